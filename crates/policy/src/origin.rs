//! Where images come from, and what is known of that.

/// Where images come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// They are known to have been made on this host.
    Here,
    /// Nobody knows.
    Elsewhere,
}

/// Who signed images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signer {
    /// The name in the certificate.
    pub name: String,
    /// The name of the authority that the certificate comes from.
    pub authority: String,
}

/// What a signature and a seal have shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checked {
    /// The images are sealed.
    pub sealed: bool,
    /// Who signed them, verified.
    pub signers: Vec<Signer>,
}
