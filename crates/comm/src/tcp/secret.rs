//! The secret of a job, and proofs of knowing it.
//!
//! Both ends of a connection send a random number, and each then shows HMAC-SHA256 of both numbers
//! under the secret, the connecting end first. A proof also says which end gives it and what the
//! connection is for, so one proof never passes for another. Nothing after the proofs is encrypted
//! or signed: they keep out everybody who can only connect, and nobody who can change the bytes of
//! a connection that is not his own.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;
use std::io;

/// The environment variable that hands the secret to the processes of a job.
pub const SECRET_VARIABLE: &str = "TRAINYARD_JOB_SECRET";
/// Fewer characters are guessed too easily.
const SECRET_CHARACTERS_MIN: usize = 16;
/// Bytes of a random number, of a proof and of a secret that is made here.
pub(super) const NONCE_BYTES: usize = 32;

pub(super) type Nonce = [u8; NONCE_BYTES];
pub(super) type Proof = [u8; 32];

/// The key by which the processes of one job know each other.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret {
    key: Vec<u8>,
    source: SecretSource,
}

/// Where a job's key comes from, which decides what it protects from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SecretSource {
    /// [`SECRET_VARIABLE`]: nobody who does not know it can take part.
    Variable,
    /// A name that a launcher gives to the job, in words. It keeps jobs apart. It is no secret:
    /// whoever knows the name and reaches the port can take part.
    JobName(String),
    /// Nothing: whoever reaches the port can take part.
    Nothing,
}

/// The end of a connection that gives a proof.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Caller = 1,
    Listener = 2,
}

/// The use of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A rank and rank 0, while the world comes together.
    Meeting = 1,
    /// Two ranks, for their messages.
    Link = 2,
    /// Hosts that come and go, and the keeper of their roster.
    Hosts = 3,
}

impl JobSecret {
    /// A secret from [`SECRET_VARIABLE`].
    ///
    /// # Errors
    /// When it is so short that it can be guessed.
    pub fn of_variable(value: &str) -> Result<Self, String> {
        let value = value.trim();
        if value.chars().count() < SECRET_CHARACTERS_MIN {
            return Err(format!(
                "has fewer than {SECRET_CHARACTERS_MIN} characters, which can be guessed: set it to the output of `openssl rand -hex 32`, the same for all ranks"
            ));
        }
        Ok(Self { key: value.as_bytes().to_vec(), source: SecretSource::Variable })
    }

    /// A key out of a launcher's name for the job, such as `Slurm job 5`.
    pub fn of_job_name(name: String) -> Self {
        Self { key: name.clone().into_bytes(), source: SecretSource::JobName(name) }
    }

    /// No secret at all.
    pub fn nothing() -> Self {
        Self { key: Vec::new(), source: SecretSource::Nothing }
    }

    /// Where it comes from.
    pub fn source(&self) -> &SecretSource {
        &self.source
    }

    /// The value of [`SECRET_VARIABLE`] for a new job: 256 random bits in hexadecimal digits.
    ///
    /// # Errors
    /// When the operating system gives no random numbers.
    pub fn random() -> io::Result<String> {
        Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn mac(&self, end: End, purpose: Purpose, caller: &Nonce, listener: &Nonce) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("HMAC takes keys of any length");
        mac.update(&[end as u8, purpose as u8]);
        mac.update(caller);
        mac.update(listener);
        mac
    }

    /// The proof of `end`, given the random numbers of the two ends.
    pub(super) fn prove(&self, end: End, purpose: Purpose, caller: &Nonce, listener: &Nonce) -> Proof {
        self.mac(end, purpose, caller, listener).finalize().into_bytes().into()
    }

    /// True for the proof that `end` gives if it knows the secret. Takes the same time for every
    /// wrong proof.
    pub(super) fn accepts(&self, proof: &[u8], end: End, purpose: Purpose, caller: &Nonce, listener: &Nonce) -> bool {
        self.mac(end, purpose, caller, listener).verify_slice(proof).is_ok()
    }
}

impl fmt::Debug for JobSecret {
    /// The source alone: reports and logs must not hold a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobSecret({:?})", self.source)
    }
}

impl fmt::Display for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretSource::Variable => f.write_str(SECRET_VARIABLE),
            SecretSource::JobName(name) => write!(f, "{name}, which is no secret"),
            SecretSource::Nothing => f.write_str("their protocol alone"),
        }
    }
}

/// A random number that is used once.
pub(super) fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(format!("no random numbers: {error}")))?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_secret_end_purpose_and_numbers_alone() {
        let secret = JobSecret::of_variable(&JobSecret::random().unwrap()).unwrap();
        let (ours, theirs) = (nonce().unwrap(), nonce().unwrap());
        let proof = secret.prove(End::Caller, Purpose::Meeting, &ours, &theirs);
        let accepts = |secret: &JobSecret, proof: &[u8], end, purpose, listener: &Nonce| {
            secret.accepts(proof, end, purpose, &ours, listener)
        };
        assert!(accepts(&secret, &proof, End::Caller, Purpose::Meeting, &theirs));
        assert!(!accepts(&secret, &proof, End::Listener, Purpose::Meeting, &theirs));
        assert!(!accepts(&secret, &proof, End::Caller, Purpose::Link, &theirs));
        assert!(!accepts(&secret, &proof, End::Caller, Purpose::Meeting, &nonce().unwrap()));
        assert!(!accepts(&secret, &proof[..31], End::Caller, Purpose::Meeting, &theirs));
        assert!(!accepts(&JobSecret::nothing(), &proof, End::Caller, Purpose::Meeting, &theirs));
        assert!(!format!("{secret:?}").contains(std::str::from_utf8(&secret.key).unwrap()));
    }

    #[test]
    fn a_secret_that_can_be_guessed_is_refused() {
        assert!(JobSecret::of_variable("hunter2").unwrap_err().contains("fewer than 16 characters"));
        assert_eq!(JobSecret::of_variable(" 0123456789abcdef\n"), JobSecret::of_variable("0123456789abcdef"));
    }
}
