//! What the controller knows and gives out (keys of images, and logins to the registry that they are in), and what it is
//! told.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use torpor_blobs::http::Login;
use ureq::http;

use crate::api::{Api, HOOKS, client, token_in};
use crate::error::{Context, Error, Result};
use crate::machine::{MACHINE_PATH, Machine};
use crate::pod::text;
use crate::restoring::{RESTORES, Report};

/// How long the controller may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it is tried again to reach one.
const RETURNS: Duration = Duration::from_secs(5);
/// How often.
const STEP: Duration = Duration::from_millis(200);
/// No answer of the controller is longer, in bytes.
const MAX_ANSWER: u64 = 1 << 16;

/// Where both come from.
#[derive(Debug)]
pub(super) struct KeySource {
    /// The URL of the controller.
    pub controller: String,
    /// The file with the token that is shown to it.
    pub token: PathBuf,
}

impl KeySource {
    /// The recipient that a new image is sealed for.
    ///
    /// # Errors
    /// If the controller does not answer, or refuses.
    pub(super) fn recipient(&self, api: &Api, namespace: &str, name: &str) -> Result<String> {
        let answer = self.ask(api, &format!("/v1/keys/seal/{namespace}/{name}"), "{}")?;
        expected(text(&answer, "/recipient"), "age1")
    }

    /// The key that opens an image for a pod.
    ///
    /// # Errors
    /// If the controller does not answer, or refuses.
    pub(super) fn identity(
        &self,
        api: &Api,
        namespace: &str,
        name: &str,
        pod: &str,
    ) -> Result<String> {
        let answer = self.ask(api, &format!("/v1/keys/open/{namespace}/{name}?pod={pod}"), "{}")?;
        expected(text(&answer, "/identity"), "AGE-SECRET-KEY-1")
    }

    /// Who a pod is to the registry that its checkpoint is stored in, and what is wrong with its pull Secrets.
    ///
    /// # Errors
    /// If the controller does not answer, or refuses.
    pub(super) fn logins(
        &self,
        api: &Api,
        namespace: &str,
        name: &str,
        pod: &str,
    ) -> Result<(Vec<Login>, Vec<String>)> {
        let answer = self.ask(api, &format!("/v1/logins/{namespace}/{name}?pod={pod}"), "{}")?;
        let texts = |field: &str| answer[field].as_array().into_iter().flatten();
        let logins = texts("logins").filter_map(Value::as_str).filter_map(Login::of_auth);
        let problems = texts("problems").filter_map(Value::as_str).map(str::to_owned);
        Ok((logins.collect(), problems.collect()))
    }

    /// Tells what this node is, and which certificate its agent shows.
    ///
    /// # Errors
    /// If the controller does not answer, or refuses.
    pub(super) fn tell(&self, api: &Api, machine: &Machine, certificate: &[u8]) -> Result<()> {
        let mut told = json!(machine);
        told["certificate"] = json!(BASE64_STANDARD.encode(certificate));
        self.ask(api, MACHINE_PATH, &told.to_string()).map(drop)
    }

    /// Tells what becomes here of a checkpoint that a pod continues from.
    ///
    /// # Errors
    /// If the controller does not answer, or refuses.
    pub(super) fn report(
        &self,
        api: &Api,
        namespace: &str,
        name: &str,
        pod: &str,
        report: &Report,
    ) -> Result<()> {
        let body = serde_json::to_string(report).context(|| RESTORES)?;
        self.ask(api, &format!("{RESTORES}{namespace}/{name}?pod={pod}"), &body).map(drop)
    }

    fn ask(&self, api: &Api, path: &str, body: &str) -> Result<Value> {
        let url = format!("{}{path}", self.controller);
        // The controllers announce their certificate where the API server looks for it.
        let hooks = api.get(HOOKS)?.unwrap_or_default();
        let bundle = text(&hooks, "/webhooks/0/clientConfig/caBundle");
        let bundle = BASE64_STANDARD.decode(bundle).context(|| HOOKS)?;
        let request = http::Request::builder()
            .method("POST")
            .uri(&url)
            .header("Authorization", format!("Bearer {}", token_in(&self.token)?))
            .body(body)
            .context(|| &url)?;
        let client = client(&bundle, PATIENCE)?;
        let silent =
            |error: ureq::Error| Error::Silent { what: url.clone(), text: error.to_string() };
        let began = Instant::now();
        let mut answer = loop {
            match client.run(request.clone()) {
                // A controller that was killed comes back, or another one takes its place.
                Err(_) if began.elapsed() < RETURNS => sleep(STEP),
                answer => break answer.map_err(silent)?,
            }
        };
        let said = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string();
        let said = said.map_err(silent)?;
        let status = answer.status();
        match status.is_success() {
            true => serde_json::from_str(&said).context(|| &url),
            false => {
                let text = said.trim().to_owned();
                Err(Error::Refused { what: url, status: status.as_u16(), text })
            }
        }
    }
}

/// The key that was asked for: whatever else is answered must not pass for one.
fn expected(key: &str, prefix: &str) -> Result<String> {
    match key.starts_with(prefix) {
        true => Ok(key.to_owned()),
        false => Err(Error::new("the controller has answered without a key")),
    }
}
