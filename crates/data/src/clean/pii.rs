//! Masks data that identify a person: e-mail addresses and public IPv4 addresses.

use std::borrow::Cow;
use std::net::Ipv4Addr;

use regex::{Captures, Regex};

/// An address in a domain that is reserved for examples (RFC 2606).
const EMAIL: &str = "email@example.com";

/// An address that is reserved for documentation (RFC 5737).
const IP: &str = "192.0.2.1";

/// The patterns of the data that are masked.
pub(super) struct Masks {
    email: Regex,
    ip: Regex,
}

/// A text with its masks.
pub(super) struct Masked<'t> {
    pub(super) text: Cow<'t, str>,
    pub(super) emails: usize,
    pub(super) ips: usize,
}

impl Masks {
    pub(super) fn new() -> Self {
        const LOCAL: &str = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*";
        const DOMAIN: &str = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?";
        let of = |pattern: &str| Regex::new(pattern).expect("the pattern is a constant");
        Self { email: of(&format!(r"\b{LOCAL}@{DOMAIN}")), ip: of(r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b") }
    }

    pub(super) fn apply<'t>(&self, text: &'t str) -> Masked<'t> {
        let mut masked = Masked { text: Cow::Borrowed(text), emails: 0, ips: 0 };
        if text.contains('@') {
            let email = |_: &Captures<'_>| {
                masked.emails += 1;
                EMAIL
            };
            masked.text = self.email.replace_all(text, email);
        }
        let ip = |found: &Captures<'_>| match found[0].parse() {
            Ok(address) if is_public(address) => {
                masked.ips += 1;
                IP.to_owned()
            }
            _ => found[0].to_owned(),
        };
        if let Cow::Owned(changed) = self.ip.replace_all(&masked.text, ip) {
            masked.text = Cow::Owned(changed);
        }
        masked
    }
}

/// True for an address that a machine on the internet may have.
fn is_public(address: Ipv4Addr) -> bool {
    let [a, b, ..] = address.octets();
    let is_shared = a == 100 && (64..128).contains(&b);
    let is_benchmark = a == 198 && (18..20).contains(&b);
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        || a >= 240;
    !(is_shared || is_benchmark || is_special)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_masked_and_counted() {
        let masks = Masks::new();
        for (text, expected, emails, ips) in [
            ("mail jane.doe+x@mail.example.org, now", "mail email@example.com, now", 1, 0),
            (
                "8.8.8.8 and 10.0.0.1 and 127.0.0.1 and 192.168.1.1",
                "192.0.2.1 and 10.0.0.1 and 127.0.0.1 and 192.168.1.1",
                0,
                1,
            ),
            ("version 1.2.3.4.5? 300.1.1.1, @ home, a@b", "version 192.0.2.1.5? 300.1.1.1, @ home, a@b", 0, 1),
            ("nothing", "nothing", 0, 0),
        ] {
            let masked = masks.apply(text);
            assert_eq!((masked.text.as_ref(), masked.emails, masked.ips), (expected, emails, ips));
        }
    }
}
