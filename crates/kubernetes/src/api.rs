//! The API server: objects as JSON, by their paths.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::Request;
use ureq::tls::{Certificate, ClientCert, PemItem, RootCerts, TlsConfig, TlsProvider, parse_pem};

use crate::error::{Context, Error, Result};

/// Where a pod finds what it needs for the API server.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The longest answer.
const MAX_ANSWER: u64 = 64 << 20;
/// The longest answer of a daemon of this machine.
const MAX_SAID: u64 = 1 << 16;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one watch lasts.
const WATCH_SECONDS: u64 = 60;

/// The API group of our objects.
pub const GROUP: &str = "/apis/torpor.dev/v1alpha1";

/// The configuration of our webhooks, with the certificate of the controllers.
pub(crate) const HOOKS: &str =
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/torpor.dev";

/// How the API server is reached.
#[derive(Debug, Clone, Default, Args)]
pub struct ApiArgs {
    /// The API server (default: the one of the pod's cluster)
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// The file with the token that is shown to it
    #[arg(long, value_name = "FILE", default_value_os_t = format!("{ACCOUNT}/token").into())]
    pub token_file: PathBuf,
    /// The file with the authorities that are believed
    #[arg(long, value_name = "FILE", default_value_os_t = format!("{ACCOUNT}/ca.crt").into())]
    pub ca_file: PathBuf,
}

/// The API server.
#[derive(Debug, Clone)]
pub struct Api {
    agent: Agent,
    server: String,
    token: PathBuf,
}

/// The token in a file: the kubelet replaces it now and then.
///
/// # Errors
/// If there is no such file, or it is not for this user to read.
pub(crate) fn token_in(file: &Path) -> Result<String> {
    let text = fs::read_to_string(file);
    Ok(text.context(|| file.display().to_string())?.trim().to_owned())
}

/// The certificates in `pem`.
#[must_use]
pub(crate) fn certificates(pem: &[u8]) -> Vec<Certificate<'static>> {
    let all = parse_pem(pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    all.collect()
}

/// A client of somebody whose certificates come from those in `pem`.
///
/// # Errors
/// If `pem` holds no certificate.
pub fn client(pem: &[u8], silence: Duration) -> Result<Agent> {
    mutual(certificates(pem), None, silence)
}

/// A client of somebody whose certificates come from those in `known`, which shows one itself.
///
/// # Errors
/// If none is known.
pub(crate) fn mutual(
    known: Vec<Certificate<'static>>,
    shown: Option<ClientCert>,
    silence: Duration,
) -> Result<Agent> {
    if known.is_empty() {
        return Err(Error::new("there is no certificate to compare the other end with"));
    }
    let tls = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .root_certs(RootCerts::Specific(Arc::new(known)))
        .client_cert(shown)
        .build();
    Ok(configured(tls, silence))
}

fn configured(tls: TlsConfig, silence: Duration) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(PATIENCE))
        .timeout_recv_response(Some(silence))
        .user_agent("torpor")
        .proxy(None)
        .tls_config(tls);
    config.build().new_agent()
}

impl Api {
    /// The API server that the arguments name.
    ///
    /// # Errors
    /// If they name none, or there are no authorities.
    pub fn open(args: &ApiArgs) -> Result<Self> {
        let server = match &args.server {
            Some(server) => server.trim_end_matches('/').to_owned(),
            None => in_cluster()?,
        };
        let pem = fs::read(&args.ca_file).context(|| args.ca_file.display().to_string())?;
        let agent = client(&pem, PATIENCE)?;
        Ok(Self { agent, server, token: args.token_file.clone() })
    }

    /// The token that is shown: the kubelet replaces it now and then.
    ///
    /// # Errors
    /// If the file of the token is not there or cannot be read.
    pub fn token(&self) -> Result<String> {
        token_in(&self.token)
    }

    fn call(&self, method: &str, path: &str, kind: &str, body: Option<&Value>) -> Result<Value> {
        let what = || format!("{method} {path}");
        let token = self.token()?;
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.server))
            .header("Authorization", format!("Bearer {token}"))
            .header("Accept", "application/json")
            .header("Content-Type", kind);
        let sent = match body {
            Some(body) => self.agent.run(request.body(body.to_string()).context(what)?),
            None => self.agent.run(request.body(()).context(what)?),
        };
        let silent = |error: ureq::Error| Error::Silent { what: what(), text: error.to_string() };
        let mut answer = sent.map_err(silent)?;
        let status = answer.status().as_u16();
        let text = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string();
        let text = text.map_err(silent)?;
        if !(200..300).contains(&status) {
            let said = serde_json::from_str::<Value>(&text).ok();
            let said = said.and_then(|v| v["message"].as_str().map(str::to_owned)).unwrap_or(text);
            return Err(Error::Refused { what: what(), status, text: said });
        }
        serde_json::from_str(&text).context(what)
    }

    /// An object, if there is one.
    ///
    /// # Errors
    /// If the API server does not answer, or refuses.
    pub fn get(&self, path: &str) -> Result<Option<Value>> {
        match self.call("GET", path, "application/json", None) {
            Ok(value) => Ok(Some(value)),
            Err(Error::Refused { status: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The objects of a list.
    ///
    /// # Errors
    /// If the API server does not answer, or refuses; if the answer is no list.
    pub fn list(&self, path: &str) -> Result<Vec<Value>> {
        let mut answer = self.call("GET", path, "application/json", None)?;
        match answer["items"].take() {
            Value::Array(items) => Ok(items),
            _ => Err(Error::new(format!("GET {path}: the answer is no list"))),
        }
    }

    /// Makes an object.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.call("POST", path, "application/json", Some(object))
    }

    /// Replaces an object, if nobody else has since it was read.
    ///
    /// # Errors
    /// If somebody has ([`Error::is_conflict`]), or the API server refuses it.
    pub fn replace(&self, path: &str, object: &Value) -> Result<Value> {
        self.call("PUT", path, "application/json", Some(object))
    }

    /// Changes an object: a JSON patch (RFC 6902).
    ///
    /// # Errors
    /// If the API server refuses it.
    pub fn patch(&self, path: &str, patch: &Value) -> Result<Value> {
        self.call("PATCH", path, "application/json-patch+json", Some(patch))
    }

    /// Removes an object; one that is gone is no error.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub fn delete(&self, path: &str) -> Result<()> {
        self.delete_with(path, &json!({ "apiVersion": "v1", "kind": "DeleteOptions" }))
    }

    /// As [`Api::delete`], with options (`DeleteOptions`).
    ///
    /// # Errors
    /// If the API server refuses it; if the object is not the one that the options want.
    pub(crate) fn delete_with(&self, path: &str, options: &Value) -> Result<()> {
        match self.call("DELETE", path, "application/json", Some(options)) {
            Ok(_) | Err(Error::Refused { status: 404, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Asks a daemon of this machine to do something, with the same token.
    ///
    /// # Errors
    /// If it is elsewhere, does not answer within `limit`, or refuses.
    pub(crate) fn post_here(&self, url: &str, limit: Duration) -> Result<()> {
        self.here("POST", url, limit).map(drop)
    }

    /// What a daemon of this machine says, with the same token.
    ///
    /// # Errors
    /// As [`Api::post_here`], and if what it says is no JSON.
    pub(crate) fn get_here(&self, url: &str, limit: Duration) -> Result<Value> {
        serde_json::from_str(&self.here("GET", url, limit)?).context(|| url)
    }

    /// Kubelets sign their certificates themselves: it is the address of this machine that makes it the kubelet.
    fn here(&self, method: &str, url: &str, limit: Duration) -> Result<String> {
        if !url.starts_with("https://127.0.0.1:") && !url.starts_with("https://[::1]:") {
            return Err(Error::new(format!("{url} is not on this machine")));
        }
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .unversioned_rustls_crypto_provider(Arc::new(
                rustls::crypto::aws_lc_rs::default_provider(),
            ))
            .disable_verification(true)
            .build();
        let agent = configured(tls, limit);
        let request = Request::builder()
            .method(method)
            .uri(url)
            .header("Authorization", format!("Bearer {}", self.token()?));
        let sent = match method {
            "GET" => agent.run(request.body(()).context(|| url)?),
            _ => agent.run(request.body("").context(|| url)?),
        };
        let mut answer = sent.context(|| url)?;
        let said = answer.body_mut().with_config().limit(MAX_SAID).read_to_string();
        match answer.status().is_success() {
            true => said.context(|| url),
            false => Err(Error::new(format!(
                "{url}: {}: {}",
                answer.status(),
                said.unwrap_or_default().trim()
            ))),
        }
    }

    /// Calls `changed` for each change of the list at `path`, until the watch ends.
    ///
    /// # Errors
    /// If the API server does not answer, or refuses it.
    pub fn watch(&self, path: &str, mut changed: impl FnMut()) -> Result<()> {
        let with = if path.contains('?') { '&' } else { '?' };
        let uri = format!("{}{path}{with}watch=1&timeoutSeconds={WATCH_SECONDS}", self.server);
        let what = || format!("watch {path}");
        let token = self.token()?;
        let request = Request::builder()
            .uri(uri)
            .header("Authorization", format!("Bearer {token}"))
            .body(())
            .context(what)?;
        let answer = self.agent.run(request).context(what)?;
        if !answer.status().is_success() {
            return Err(Error::new(format!("{}: {}", what(), answer.status())));
        }
        let body = answer.into_body().into_with_config().limit(u64::MAX).reader();
        let mut reader = BufReader::new(body);
        let mut line = Vec::new();
        loop {
            line.clear();
            if reader.read_until(b'\n', &mut line).context(what)? == 0 {
                return Ok(());
            }
            changed();
        }
    }
}

fn in_cluster() -> Result<String> {
    let variable = |name: &str| std::env::var(name);
    match (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT")) {
        (Ok(host), Ok(port)) if host.contains(':') => Ok(format!("https://[{host}]:{port}")),
        (Ok(host), Ok(port)) => Ok(format!("https://{host}:{port}")),
        _ => Err(Error::new("this is no pod of a cluster: give --server, --token-file, --ca-file")),
    }
}
