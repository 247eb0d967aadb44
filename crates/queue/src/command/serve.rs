//! `serve`

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use torpor_worker::{Class, Outcome, tell};

use crate::daemon::config::Config;
use crate::daemon::{Setup, Tls, Tokens, serve};
use crate::http::{Address, DEFAULT};
use crate::preemption::Means;

/// Options of the daemon.
#[derive(Debug, Args)]
pub struct Serve {
    /// Where jobs, their output and their checkpoints lie
    #[arg(long, value_name = "DIR", default_value = "/var/lib/torpor/queue")]
    data: PathBuf,
    /// Where to listen: unix:PATH, http://127.0.0.1:PORT or https://HOST:PORT; may be given
    /// several times
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT)]
    listen: Vec<Address>,
    /// How many jobs of one slot run at the same time [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    slots: Option<u32>,
    /// Classes, shares, quotas and times, in JSON
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where checkpoints are kept apart from this machine: dir:PATH or s3://BUCKET/PREFIX
    #[arg(long, value_name = "PLACE", value_parser = place)]
    store: Option<String>,
    /// The means by which jobs may give way: stop, checkpoint, command, kill
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = means)]
    means: Option<Vec<Means>>,
    /// Who may ask over the network: a list of {token, owner, admin, uid, gid} in JSON
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// The certificate for https, followed by those that lead from it to an authority
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of the certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The authority of a pool's own: whoever shows a certificate of it is another machine, and may
    /// hand jobs over
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
}

fn means(word: &str) -> Result<Means, String> {
    serde_json::from_value(serde_json::json!(word))
        .map_err(|_| "means are stop, checkpoint, command and kill".to_owned())
}

fn place(word: &str) -> Result<String, String> {
    crate::objects::Objects::at(word).map(|_| word.to_owned())
}

/// Warns of a secret that others may read.
fn warn_of_readers(path: &Path) {
    // One that cannot be read is told of by whoever reads it.
    let mode = path.metadata().map_or(0, |meta| meta.mode() & 0o777);
    if mode & 0o077 != 0 {
        let path = path.display();
        tell!(
            "torpor queue: others may read {path}, which has the mode {mode:03o}: chmod 600 {path}"
        );
    }
}

impl Serve {
    /// Runs the daemon.
    ///
    /// # Errors
    /// If this user is not root; if its configuration, a file with secrets or its data directory cannot be read; if it cannot listen
    /// where it is to.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        if !rustix::process::geteuid().is_root() {
            let text = "the daemon must be root: each job gets namespaces and cgroups of its own";
            return Err(Outcome::failed(Class::Forbidden, text));
        }
        let mut config = match &self.config {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        };
        config.try_keys()?;
        config.slots = self.slots.or(config.slots);
        config.store = self.store.or(config.store);
        if let Some(means) = &self.means {
            config.allow_only(means);
        }
        self.tokens.iter().chain(&self.tls_key).for_each(|path| warn_of_readers(path));
        let tokens = self.tokens.as_deref().map(Tokens::read).transpose()?.unwrap_or_default();
        let tls = self.tls_cert.zip(self.tls_key);
        let tls = tls.map(|(certificate, key)| Tls { certificate, key, authority: self.tls_ca });
        serve(Setup { data: self.data, listen: self.listen, config, tokens, tls })?;
        Ok(ExitCode::SUCCESS)
    }
}
