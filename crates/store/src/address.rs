//! URLs of objects: schemes, braces, patterns, and what of them may be printed.

use std::path::Path;

use crate::error::StoreError;

/// The kind of service that a URL names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scheme {
    S3,
    Gcs,
    Azure,
    Http,
}

/// Schemes by name.
const SCHEMES: &[(&str, Scheme)] = &[
    ("s3", Scheme::S3),
    ("s3a", Scheme::S3),
    ("gs", Scheme::Gcs),
    ("az", Scheme::Azure),
    ("azure", Scheme::Azure),
    ("abfs", Scheme::Azure),
    ("abfss", Scheme::Azure),
    ("http", Scheme::Http),
    ("https", Scheme::Http),
];

/// URLs that braces expand to, at most.
const EXPANDED_MAX: usize = 1_000_000;

/// True if `path` is a URL rather than a path: it begins with letters and `://`.
pub fn is_url(path: &Path) -> bool {
    let Some((scheme, _)) = path.to_str().and_then(|text| text.split_once("://")) else { return false };
    scheme.len() > 1 && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+')
}

/// A URL in parts, without braces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) scheme: Scheme,
    /// The whole URL, which may hold secrets.
    pub(crate) url: String,
    /// Scheme and bucket, or scheme and host: `s3://bucket`.
    pub(crate) bucket: String,
    /// The rest of the name, without the slash between them and without a query.
    pub(crate) key: String,
}

impl Address {
    pub(crate) fn parse(url: &str) -> Result<Self, StoreError> {
        let (name, rest) = url.split_once("://").unwrap_or(("", url));
        let lower = name.to_ascii_lowercase();
        let Some((_, scheme)) = SCHEMES.iter().find(|(known, _)| *known == lower) else {
            let what = format!("{name:?} is not a kind of source");
            return Err(StoreError::new(
                printable(url),
                what,
                "give a path, or s3://, gs://, az://, http:// or https://",
            ));
        };
        let (host, key) = rest.split_once('/').unwrap_or((rest, ""));
        let host = if *scheme == Scheme::Http { host.split(['?', '#']).next().unwrap_or(host) } else { host };
        if host.is_empty() {
            let what = if *scheme == Scheme::Http { "names no host" } else { "names no bucket" };
            return Err(StoreError::new(printable(url), what, format!("write {lower}://NAME/PATH")));
        }
        // An `@` of Azure's abfss://container@account.dfs.core.windows.net is no password.
        if *scheme == Scheme::Http && host.contains('@') {
            let fix = "give a URL without them: a signed URL, or a server that asks for none";
            return Err(StoreError::new(printable(url), "holds a user or a password, which are not sent", fix));
        }
        let key = if *scheme == Scheme::Http { key.split(['?', '#']).next().unwrap_or(key) } else { key };
        let bucket = format!("{lower}://{host}");
        Ok(Self { scheme: *scheme, url: url.to_owned(), bucket, key: key.to_owned() })
    }

    /// The URL as it is printed and remembered, without its query.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.bucket, self.key)
    }

    /// True if it names more than one object: it has wildcards, or it ends with a slash. A URL of
    /// an HTTP server has none, because such servers cannot be asked for a list.
    pub(crate) fn is_pattern(&self) -> bool {
        self.key.is_empty() || self.key.ends_with('/') || self.key.contains(['*', '?', '['])
    }
}

/// A URL without query, fragment and password: these may be secrets.
pub(crate) fn printable(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    if !matches!(scheme.to_ascii_lowercase().as_str(), "http" | "https") {
        return url.to_owned();
    }
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    let (host, key) = rest.split_once('/').map_or((rest, None), |(host, key)| (host, Some(key)));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    match key {
        Some(key) => format!("{scheme}://{host}/{key}"),
        None => format!("{scheme}://{host}"),
    }
}

/// The URLs that `url` stands for: `{a,b}` is each of its parts, `{000..012}` each number with
/// as many digits.
pub(crate) fn expand_braces(url: &str) -> Result<Vec<String>, StoreError> {
    let Some(open) = url.find('{') else { return Ok(vec![url.to_owned()]) };
    let refuse = |what: &str| {
        StoreError::new(printable(url), what, "write {000..099} for numbers, or {a,b,c} for words, one inside no other")
    };
    let inside = &url[open + 1..];
    let close = inside.find('}').ok_or_else(|| refuse("has a { without its }"))?;
    let (inside, rest) = (&inside[..close], &inside[close + 1..]);
    let parts: Vec<String> = match inside.split_once("..") {
        Some((first, last)) => {
            let number = |text: &str| text.parse::<u64>().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
            let (Some(from), Some(to)) = (number(first), number(last)) else {
                return Err(refuse("has braces that are no range of numbers"));
            };
            if from > to || to - from >= EXPANDED_MAX as u64 {
                return Err(refuse("has braces with a range that falls, or of a million numbers and more"));
            }
            (from..=to).map(|number| format!("{number:0width$}", width = first.len())).collect()
        }
        None if inside.contains(',') && !inside.contains('{') => inside.split(',').map(str::to_owned).collect(),
        None => return Err(refuse("has braces that are neither a range nor a list")),
    };
    let rests = expand_braces(rest)?;
    if parts.len().saturating_mul(rests.len()) > EXPANDED_MAX {
        return Err(refuse("has braces that stand for more than a million URLs"));
    }
    Ok(parts.iter().flat_map(|part| rests.iter().map(move |rest| format!("{}{part}{rest}", &url[..open]))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_are_expanded_with_their_digits() {
        assert_eq!(
            expand_braces("s3://b/{08..11}.tar").unwrap(),
            ["08", "09", "10", "11"].map(|n| format!("s3://b/{n}.tar"))
        );
        assert_eq!(
            expand_braces("http://h/{a,b}-{1..2}").unwrap(),
            ["a-1", "a-2", "b-1", "b-2"].map(|n| format!("http://h/{n}"))
        );
        for bad in
            ["s3://b/{1..", "s3://b/{2..1}", "s3://b/{a}", "s3://b/{a..b}", "s3://b/{1..9999999}", "s3://b/{{a,b},c}"]
        {
            assert!(expand_braces(bad).is_err(), "{bad}");
        }
        let many = format!("s3://b/{}", "{0..999}".repeat(3));
        assert!(expand_braces(&many).unwrap_err().to_string().contains("million"));
    }

    #[test]
    fn secrets_are_not_part_of_a_name() {
        let signed = Address::parse("https://host/a/b.tar?X-Amz-Signature=secret#x").unwrap();
        assert_eq!(signed.name(), "https://host/a/b.tar");
        let refused = Address::parse("https://me:secret@host/a?token=secret").unwrap_err().to_string();
        assert!(refused.starts_with("https://host/a: holds a user") && !refused.contains("secret"), "{refused}");
    }

    #[test]
    fn kinds_of_urls() {
        assert!(is_url(Path::new("s3://bucket/x")) && is_url(Path::new("ftp://x")) && !is_url(Path::new("a/b://c")));
        assert!(Address::parse("ftp://x/y").unwrap_err().to_string().contains("not a kind of source"));
        assert!(Address::parse("s3:///y").unwrap_err().to_string().contains("no bucket"));
        let address = Address::parse("S3://bucket/deep/*.tar").unwrap();
        assert_eq!((address.bucket.as_str(), address.key.as_str()), ("s3://bucket", "deep/*.tar"));
        assert!(address.is_pattern() && Address::parse("s3://bucket").unwrap().is_pattern());
        assert!(!Address::parse("s3://bucket/a.tar").unwrap().is_pattern());
    }
}
