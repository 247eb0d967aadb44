//! The certificate of the webhook: made here, kept in a Secret for all controllers, made anew before
//! it ends, and announced in the configuration of the webhooks. The controller that leads does that. The
//! others serve with it when it is announced, and until then with the one before it, which stays announced.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::{CertificateParams, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};

use crate::agent::server;
use crate::api::{Api, HOOKS};
use crate::error::{Context, Error, Result};
use crate::pod::{annotation, text};
use crate::time;

/// How long it is good, in seconds.
const LIFE: i64 = 90 * 86_400;
/// When it is made anew.
const RENEW: i64 = 30 * 86_400;
/// Where the Secret says when it was made.
const MADE: &str = "torpor.dev/made";
/// Where the Secret has the certificate before it.
const BEFORE: &str = "before.crt";
/// The Secret, and the Service.
const NAME: &str = "torpor-webhook";

/// A certificate, and what serves with it.
#[derive(Debug, Clone)]
pub(super) struct Certificate {
    pem: String,
    /// The one before it; empty if there was none.
    before: String,
    /// What serves with it.
    pub tls: Arc<ServerConfig>,
    made: i64,
}

impl Certificate {
    /// Whether it is to be made anew.
    #[must_use]
    pub(super) fn is_old(&self) -> bool {
        time::now() > self.made + LIFE - RENEW
    }

    /// The one in the Secret, or a new one: if there is none, or if it is old and this controller `leads`.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub(super) fn load(api: &Api, namespace: &str, leads: bool) -> Result<Self> {
        let list = format!("/api/v1/namespaces/{namespace}/secrets");
        let path = format!("{list}/{NAME}");
        // Another controller may make one at the same time: then theirs is taken.
        for _ in 0..3 {
            let known = api.get(&path)?;
            let found = known.as_ref().and_then(|secret| read(secret).ok());
            if let Some(found) = found.as_ref().filter(|found| !leads || !found.is_old()) {
                return Ok(found.clone());
            }
            let mut secret = make(namespace)?;
            if let Some(before) = found {
                secret["data"][BEFORE] = json!(BASE64_STANDARD.encode(before.pem));
            }
            let written = match &known {
                Some(known) => {
                    let version = known["metadata"]["resourceVersion"].clone();
                    secret["metadata"]["resourceVersion"] = version;
                    api.replace(&path, &secret)
                }
                None => api.create(&list, &secret),
            };
            match written {
                Ok(_) => return read(&secret),
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::new("others keep on changing the certificate of the webhook"))
    }

    /// Whether the API server, and so the agents, believe it.
    ///
    /// # Errors
    /// If the API server does not say.
    pub(super) fn is_announced(&self, api: &Api) -> Result<bool> {
        let hooks = api.get(HOOKS)?.unwrap_or_default();
        let believed = |hook: &Value| {
            let bundle = text(hook, "/clientConfig/caBundle");
            let bundle = BASE64_STANDARD.decode(bundle).unwrap_or_default();
            String::from_utf8_lossy(&bundle).contains(&self.pem)
        };
        Ok(hooks["webhooks"].as_array().is_some_and(|hooks| hooks.iter().all(believed)))
    }

    /// Tells the API server to believe it, and still the one before it.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub(super) fn announce(&self, api: &Api) -> Result<()> {
        let Some(mut hooks) = api.get(HOOKS)? else { return Ok(()) };
        let bundle = json!(BASE64_STANDARD.encode(format!("{}{}", self.pem, self.before)));
        let mut changed = false;
        for hook in hooks["webhooks"].as_array_mut().into_iter().flatten() {
            if hook["clientConfig"]["caBundle"] != bundle {
                hook["clientConfig"]["caBundle"] = bundle.clone();
                changed = true;
            }
        }
        if changed { api.replace(HOOKS, &hooks).map(drop) } else { Ok(()) }
    }
}

fn make(namespace: &str) -> Result<Value> {
    let what = || "the certificate of the webhook";
    let key = KeyPair::generate().context(what)?;
    let names = vec![
        format!("{NAME}.{namespace}.svc"),
        format!("{NAME}.{namespace}.svc.cluster.local"),
        "localhost".to_owned(),
        "127.0.0.1".to_owned(),
    ];
    let params = CertificateParams::new(names).context(what)?;
    let certificate = params.self_signed(&key).context(what)?;
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {
            "name": NAME,
            "namespace": namespace,
            "annotations": { MADE: time::format(time::now()) },
        },
        "data": {
            "tls.crt": BASE64_STANDARD.encode(certificate.pem()),
            "tls.key": BASE64_STANDARD.encode(key.serialize_pem()),
        },
    }))
}

fn read(secret: &Value) -> Result<Certificate> {
    let what = || "the Secret of the webhook";
    let field = |name: &str| -> Result<String> {
        let text = secret["data"][name].as_str().unwrap_or_default();
        let bytes = BASE64_STANDARD.decode(text).context(what)?;
        String::from_utf8(bytes).context(what)
    };
    let made = annotation(secret, MADE).and_then(time::parse);
    let made =
        made.ok_or_else(|| Error::new(format!("{} does not say when it was made", what())))?;
    let pem = field("tls.crt")?;
    let key = KeyPair::from_pem(&field("tls.key")?).context(what)?;
    let chain = CertificateDer::pem_slice_iter(pem.as_bytes());
    let chain = chain.collect::<std::result::Result<Vec<_>, _>>().context(what)?;
    Ok(Certificate { tls: server(chain, &key)?, pem, before: field(BEFORE)?, made })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_end_and_are_made_anew_before() {
        let mut secret = make("torpor-system").unwrap();
        let certificate = read(&secret).unwrap();
        assert!(!certificate.is_old());
        let long_ago = time::format(time::now() - LIFE + RENEW - 10);
        secret["metadata"]["annotations"][MADE] = json!(long_ago);
        assert!(read(&secret).unwrap().is_old());
        secret["data"]["tls.key"] = json!("bm9uZQ==");
        assert!(read(&secret).is_err());
    }
}
