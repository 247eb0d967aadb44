//! What can be wrong with keys, each in a sentence.

use std::path::PathBuf;

/// The result of an operation with keys.
pub type Result<T, E = KeyError> = std::result::Result<T, E>;

/// What is wrong with a key, a certificate or a provider.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file holds something else than what it was named for.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A recipient or identity that makes no sense.
    #[error("{what}: {reason}")]
    Spec {
        /// As it was given.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A certificate's time is over.
    #[error("certificate {subject} has expired on {since}")]
    Expired {
        /// Whose certificate.
        subject: String,
        /// When.
        since: String,
    },
    /// A certificate's time has not come.
    #[error("certificate {subject} is not valid before {from}")]
    NotYetValid {
        /// Whose certificate.
        subject: String,
        /// When it will be.
        from: String,
    },
    /// A certificate stands in a list of revocations.
    #[error("certificate {subject} has been revoked")]
    Revoked {
        /// Whose certificate.
        subject: String,
    },
    /// No configured authority stands behind a certificate.
    #[error("certificate {subject} is not trusted: {reason}")]
    Untrusted {
        /// Whose certificate.
        subject: String,
        /// What is missing.
        reason: String,
    },
    /// The images are sealed, and nobody said with which key to open them.
    #[error("the images are sealed, and no key to open them is given: name one with --identity")]
    NoIdentity,
    /// None of the identities is that of a recipient.
    #[error("the images are sealed for others: none of the given keys opens them ({recipients})")]
    NotForUs {
        /// For whom they are sealed.
        recipients: String,
    },
    /// A stanza names its recipient, but does not open.
    #[error("the images' key does not open with {identity}: it was damaged or exchanged")]
    Damaged {
        /// Whose key was tried.
        identity: String,
    },
    /// A key provider did not do its work.
    #[error("key provider {program}: {reason}")]
    Provider {
        /// The command.
        program: String,
        /// What went wrong.
        reason: String,
    },
    /// A key provider gave no answer in time.
    #[error("key provider {program}: it did not answer within {seconds} seconds")]
    Late {
        /// The command.
        program: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// A signature is wrong.
    #[error("the signature of {subject} does not fit the images: they were changed after signing")]
    Signature {
        /// Who is said to have signed.
        subject: String,
    },
    /// Nobody is trusted to sign.
    #[error("no authority is given whose signatures to trust: name one with --trust")]
    NoTrust,
    /// The library of ciphers refused.
    #[error("{what} failed")]
    Cipher {
        /// The operation.
        what: &'static str,
    },
}

/// Text from a file or a program, fit to be shown in a line.
pub(crate) fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
