//! Credentials and regions from the files of the AWS command line: `~/.aws/credentials` and
//! `~/.aws/config`, which `object_store` does not read.

use std::collections::HashMap;
use std::env;
use std::path::PathBuf;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

/// Variables that name credentials. With any of them the file is not needed.
const CREDENTIALS: &[&str] = &[
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
];

/// Adds what the profile `AWS_PROFILE`, or `default`, says and the environment does not.
pub(crate) fn with_profile(mut builder: AmazonS3Builder) -> AmazonS3Builder {
    let profile = env::var("AWS_PROFILE").unwrap_or_else(|_| "default".into());
    let read = |variable: &str, name: &str| {
        let path = env::var_os(variable).map(PathBuf::from).or_else(|| Some(env::home_dir()?.join(".aws").join(name)));
        path.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default()
    };
    let mut values = section(&read("AWS_CONFIG_FILE", "config"), &profile);
    values.extend(section(&read("AWS_SHARED_CREDENTIALS_FILE", "credentials"), &profile));
    let is_set = |names: &[&str]| names.iter().any(|name| env::var_os(name).is_some());
    let mut take = |key: AmazonS3ConfigKey, name: &str| {
        if let Some(value) = values.remove(name) {
            builder = std::mem::take(&mut builder).with_config(key, value);
        }
    };
    if !is_set(CREDENTIALS) {
        take(AmazonS3ConfigKey::AccessKeyId, "aws_access_key_id");
        take(AmazonS3ConfigKey::SecretAccessKey, "aws_secret_access_key");
        take(AmazonS3ConfigKey::Token, "aws_session_token");
    }
    if !is_set(&["AWS_REGION", "AWS_DEFAULT_REGION"]) {
        take(AmazonS3ConfigKey::Region, "region");
    }
    if !is_set(&["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"]) {
        take(AmazonS3ConfigKey::Endpoint, "endpoint_url");
    }
    builder
}

/// The values of `[NAME]` or `[profile NAME]`.
fn section(text: &str, name: &str) -> HashMap<String, String> {
    let mut values = HashMap::new();
    let mut is_ours = false;
    for line in text.lines() {
        if let Some(title) = line.trim().strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            let title = title.trim();
            is_ours = title.strip_prefix("profile ").unwrap_or(title).trim() == name;
        } else if let Some((key, value)) = line.split_once('=').filter(|_| is_ours)
            // Indented lines belong to the setting above them; # and ; begin comments.
            && !line.starts_with([' ', '\t', '#', ';'])
        {
            values.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::section;

    #[test]
    fn a_profile_is_read_from_its_section() {
        let text = "# mine\n[default]\nregion = eu-west-1\ns3 =\n  region = nested\n\
                    [profile lab]\nRegion=us-east-2\n; x = y\naws_access_key_id = A=B\n";
        assert_eq!(section(text, "default")["region"], "eu-west-1");
        let lab = section(text, "lab");
        assert_eq!((lab["region"].as_str(), lab["aws_access_key_id"].as_str(), lab.len()), ("us-east-2", "A=B", 2));
        assert!(section(text, "other").is_empty());
    }
}
