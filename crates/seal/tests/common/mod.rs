//! Authorities and certificates, made for a test.

#![allow(dead_code, missing_docs, reason = "not every test needs all of it")]

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

/// An authority.
pub struct Authority {
    dir: PathBuf,
    name: String,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The files of a certificate and its key.
pub struct Files {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// The years from whose first days on, and until whose first days, a certificate is valid.
pub type Years = (i32, i32);

/// Valid now, whenever that is.
pub const NOW: Years = (2000, 2999);

fn params(name: &str, (from, until): Years) -> CertificateParams {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(from, 1, 1);
    params.not_after = date_time_ymd(until, 1, 1);
    params
}

fn authority(name: &str, years: Years) -> CertificateParams {
    let mut params = params(name, years);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

impl Authority {
    pub fn new(dir: &Path, name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::self_signed(authority(name, NOW), key).unwrap();
        std::fs::write(dir.join(format!("{name}.crt")), issuer.pem()).unwrap();
        Self { dir: dir.to_owned(), name: name.into(), issuer }
    }

    pub fn cert(&self) -> PathBuf {
        self.dir.join(format!("{}.crt", self.name))
    }

    /// A certificate and its key, of P-256, with the usages given.
    pub fn issue(&self, name: &str, years: Years, usages: &[KeyUsagePurpose]) -> Files {
        let key = KeyPair::generate().unwrap();
        let mut params = params(name, years);
        params.key_usages = usages.to_vec();
        params.serial_number = Some(serial(name));
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let at = |kind: &str| self.dir.join(format!("{name}.{kind}"));
        std::fs::write(at("crt"), cert.pem()).unwrap();
        std::fs::write(at("key"), key.serialize_pem()).unwrap();
        Files { cert: at("crt"), key: at("key") }
    }

    /// Another certificate for the key of `files`, in DER.
    pub fn issue_again(&self, files: &Files, name: &str, years: Years) -> Vec<u8> {
        let key = std::fs::read_to_string(&files.key).unwrap();
        let key = KeyPair::from_pem(&key).unwrap();
        params(name, years).signed_by(&key, &self.issuer).unwrap().der().to_vec()
    }

    /// An authority below this one.
    pub fn issue_authority(&self, name: &str, years: Years) -> Self {
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::signed_by(authority(name, years), key, &self.issuer).unwrap();
        std::fs::write(self.dir.join(format!("{name}.crt")), issuer.pem()).unwrap();
        Self { dir: self.dir.clone(), name: name.into(), issuer }
    }

    /// A list that takes the certificates of these names back, fresh until `until`.
    pub fn revoke(&self, names: &[&str], until: i32) -> PathBuf {
        let revoked_certs = names.iter().map(|name| RevokedCertParams {
            serial_number: serial(name),
            revocation_time: date_time_ymd(2001, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2001, 1, 1),
            next_update: date_time_ymd(until, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.dir.join(format!("{}-{until}.crl", self.name));
        std::fs::write(&path, list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
        path
    }
}

fn serial(name: &str) -> SerialNumber {
    SerialNumber::from_slice(&[b"\x01", name.as_bytes()].concat()[..name.len().min(15) + 1])
}
