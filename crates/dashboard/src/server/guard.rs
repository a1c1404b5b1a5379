//! The rule for requests: the loopback by its own names, or a token.

use super::ServeError;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Request, StatusCode};
use std::net::IpAddr;

/// The least length of a token that users choose.
pub const TOKEN_LEN_MIN: usize = 16;

/// The cookie that holds the token.
const COOKIE: &str = "trainyard_token";

/// Headers of every answer. The page may load nothing from elsewhere, and no other page may show
/// it.
pub const HEADERS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

/// The rule for requests.
#[derive(Debug)]
pub enum Guard {
    /// Requests of this machine, by a name of this machine.
    Loopback,
    /// Requests with this token.
    Token(String),
}

/// The answer to a request.
#[derive(Debug)]
pub enum Verdict {
    /// It may be answered.
    Allowed,
    /// It has the token in its address: the browser keeps it in this cookie.
    SignIn(HeaderValue),
    /// It may not.
    Refused(StatusCode, &'static str),
}

impl Guard {
    /// The rule for a server on `host`. Without a `token` the loopback needs none, and other hosts
    /// get a random one.
    ///
    /// # Errors
    ///
    /// The token is too short or has other characters than letters, digits, `-` and `_`.
    pub fn new(host: IpAddr, token: Option<&str>) -> Result<Guard, ServeError> {
        match token {
            None if host.is_loopback() => Ok(Guard::Loopback),
            None => {
                let mut random = [0; 16];
                getrandom::fill(&mut random)
                    .map_err(|error| ServeError::Start(std::io::Error::other(error.to_string())))?;
                Ok(Guard::Token(random.iter().map(|byte| format!("{byte:02x}")).collect()))
            }
            Some(token) => {
                let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
                if token.len() < TOKEN_LEN_MIN || !token.chars().all(plain) {
                    return Err(ServeError::Token);
                }
                Ok(Guard::Token(token.to_owned()))
            }
        }
    }

    /// The token, if requests need one.
    pub fn token(&self) -> Option<&str> {
        match self {
            Guard::Loopback => None,
            Guard::Token(token) => Some(token),
        }
    }

    /// Checks a request.
    pub fn check<B>(&self, request: &Request<B>) -> Verdict {
        let headers = request.headers();
        let Guard::Token(token) = self else {
            let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
            return match host {
                Some(host) if is_this_machine(host) => Verdict::Allowed,
                _ => Verdict::Refused(StatusCode::FORBIDDEN, "this server answers to localhost only"),
            };
        };
        let query = request.uri().query().unwrap_or("");
        if query.split('&').filter_map(|pair| pair.strip_prefix("token=")).any(|given| is_same(given, token)) {
            // Programs get their answer; a browser gets a cookie and an address without the token.
            if request.uri().path() != "/" {
                return Verdict::Allowed;
            }
            let cookie = format!("{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict");
            return match HeaderValue::from_str(&cookie) {
                Ok(cookie) => Verdict::SignIn(cookie),
                Err(_) => Verdict::Refused(StatusCode::BAD_REQUEST, "a token has letters and digits"),
            };
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let cookies = cookies.flat_map(|value| value.split(';'));
        let cookies = cookies.filter_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='));
        if bearer.into_iter().chain(cookies).any(|given| is_same(given, token)) {
            return Verdict::Allowed;
        }
        Verdict::Refused(
            StatusCode::UNAUTHORIZED,
            "this server needs its token: open the address that it printed, or send it as `Authorization: Bearer TOKEN`",
        )
    }
}

/// Compares in a time that does not depend on where the difference is.
fn is_same(given: &str, token: &str) -> bool {
    let differences = given.bytes().zip(token.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    given.len() == token.len() && differences == 0
}

/// True for the names of the loopback, with or without a port.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.split(':').next().unwrap_or(""),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
