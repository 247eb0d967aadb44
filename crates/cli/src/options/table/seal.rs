//! The options of sealed checkpoints.

use super::{Commands, DEDUP, DUMPS, Opt, PEERS, RESTORE, flag, value};
use crate::options::value::{parsed, path, string};

/// Who reads sealed images.
const READERS: Commands = PEERS | DEDUP;

/// They count for dumps as well: a sealed dump reads the one that it builds on.
pub(super) const SEAL: &[Opt] = &[
    flag(
        "encrypt",
        Some('e'),
        DUMPS,
        |s, on| s.seal.encrypt = Some(on),
        "Seal the images: nobody but the recipients can read them, and no change of them goes \
         unnoticed",
    ),
    value(
        ("recipient", None, "WHO"),
        DUMPS,
        store!(seal.recipients += string),
        "Seal the images for WHO: age1..., a file with a certificate (RSA, P-256, P-384 or X25519) \
         or with age1... lines, or provider:/PROGRAM[:KEY]; may be given several times",
    ),
    value(
        ("identity", None, "KEY"),
        READERS,
        store!(seal.identities += string),
        "Open sealed images with KEY: a file with a private key or with AGE-SECRET-KEY-... lines, \
         or provider:/PROGRAM[:KEY]; may be given several times",
    ),
    value(
        ("suite", None, "NAME"),
        DUMPS,
        store!(seal.suite = parsed),
        "The ciphers of sealed memory: aes-256-gcm (default) or aes-256-xts+hmac-sha256",
    ),
    value(
        ("sign-key", None, "FILE"),
        DUMPS,
        store!(seal.sign_key = some path),
        "Sign sealed images with the private key in FILE (Ed25519, P-256, P-384 or RSA)",
    ),
    value(
        ("sign-cert", None, "FILE"),
        DUMPS,
        store!(seal.sign_cert = some path),
        "The certificate of --sign-key, followed by those that lead from it to an authority",
    ),
    value(
        ("trust", None, "FILE"),
        READERS,
        store!(seal.trust += path),
        "Believe only certificates, of recipients and of signers, that come from the authorities \
         in FILE; may be given several times",
    ),
    value(
        ("crl", None, "FILE"),
        READERS,
        store!(seal.crl += path),
        "Refuse certificates that FILE lists as revoked",
    ),
    flag(
        "require-signature",
        None,
        RESTORE,
        |s, on| s.seal.require_signature = on,
        "Restore only images that are sealed, and signed by somebody whom --trust believes",
    ),
];
