//! What the options add up to.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use torpor_engine::options::{InheritFd, PageServer, Tls, Trust};
use torpor_engine::{External, FuseServer, Options};

use crate::seal::SealSettings;

/// The log level unless `-v` says otherwise: errors and warnings.
pub(crate) const DEFAULT_VERBOSITY: u8 = 2;

/// Everything that options can set: the engine's [`Options`], and what the program
/// itself does around the engine.
///
/// Descriptors stay numbers here, so that reading options has no side effects;
/// [`Settings::adopt_descriptors`] turns them into open files.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What the engine is asked to do.
    pub engine: Options,
    /// What `--inherit-fd` names.
    pub inherit_fd: Vec<(i32, String)>,
    /// `--fuse`.
    pub fuse: Vec<FuseServer>,
    /// `--status-fd`.
    pub status_fd: Option<i32>,
    /// The same, opened: a zero byte is written here when pages can be fetched, or clients come.
    pub ready_fd: Option<Arc<OwnedFd>>,
    /// `--ps-socket`.
    pub ps_socket: Option<i32>,
    /// `--lazy-socket`.
    pub lazy_socket: Option<i32>,
    /// `--keep-template`.
    pub keep_template: Option<PathBuf>,
    /// `--rounds`.
    pub rounds: Option<PathBuf>,
    /// `--close`.
    pub close_fds: Vec<i32>,
    /// `--enable-external-sharing`.
    pub external_sharing: bool,
    /// `--enable-external-masters`.
    pub external_masters: bool,

    /// `-o`: where the log goes, relative to the work directory.
    pub log_file: Option<PathBuf>,
    /// `-v`: 0 nothing, 1 errors, 2 warnings, 3 information, 4 and more debugging.
    pub verbosity: u8,
    /// The log goes to the standard error (RPC `log_to_stderr`).
    pub log_to_stderr: bool,
    /// `--display-stats`.
    pub display_stats: bool,
    /// `--json`: the outcome goes to the standard output, for programs.
    pub json: bool,
    /// `--action-script`.
    pub action_scripts: Vec<String>,

    /// `--policy`: the restore policy.
    pub policy: Option<PathBuf>,
    /// `--policy-rule`: rules in place of those of the policy.
    pub policy_rules: Vec<String>,

    /// `--config`.
    pub config: Option<PathBuf>,
    /// Whether the default configuration files count (not `--no-default-config`).
    pub default_config: bool,
    /// `-h` was given.
    pub help: bool,
    /// `-V` was given.
    pub version: bool,

    /// `--page-server`: pages go to a page server.
    pub use_page_server: bool,
    /// `--address`: of the page server, or the service's socket.
    pub address: Option<String>,
    /// `--port`, and the connection of `--ps-socket`.
    pub page_server: PageServer,
    /// `--tls`.
    pub tls: bool,
    /// `--tls-cacert` and its like.
    pub tls_files: Tls,
    /// `--encrypt` and its like.
    pub seal: SealSettings,
    /// `--exec-cmd` was given: what follows `--` is the command.
    pub exec_cmd: bool,
    /// After a restore, become this program, the parent of the root task.
    pub exec_command: Option<Vec<OsString>>,
    /// `-d`: the restored tasks live on when this program ends; servers go on in the background.
    pub detached: bool,
    /// `--pidfile`: the pid of the root task, or of a server, is written here.
    pub pidfile: Option<PathBuf>,
    /// `--unprivileged`: work without root, with `CAP_CHECKPOINT_RESTORE`.
    pub unprivileged: bool,

    /// `--feature`: the only things to check.
    pub features: Vec<String>,
    /// `--extra`, `--all`.
    pub check_extra: bool,
    /// `--experimental`, `--all`.
    pub check_experimental: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            engine: Options {
                trust: Trust { host_key: Some(crate::policy::HOST_KEY.into()), ..Trust::default() },
                ..Options::default()
            },
            inherit_fd: Vec::new(),
            fuse: Vec::new(),
            status_fd: None,
            ready_fd: None,
            ps_socket: None,
            lazy_socket: None,
            keep_template: None,
            rounds: None,
            close_fds: Vec::new(),
            external_sharing: false,
            external_masters: false,
            log_file: None,
            verbosity: DEFAULT_VERBOSITY,
            log_to_stderr: false,
            display_stats: false,
            json: false,
            action_scripts: Vec::new(),
            policy: None,
            policy_rules: Vec::new(),
            config: None,
            default_config: true,
            help: false,
            version: false,
            use_page_server: false,
            address: None,
            page_server: PageServer::default(),
            tls: false,
            tls_files: Tls::default(),
            seal: SealSettings::default(),
            exec_cmd: false,
            exec_command: None,
            detached: false,
            pidfile: None,
            unprivileged: false,
            features: Vec::new(),
            check_extra: false,
            check_experimental: false,
        }
    }
}

impl Settings {
    /// Whether to go on in the background (`-d` of the serving commands, which is
    /// one option with `--restore-detached`).
    #[must_use]
    pub fn daemon(&self) -> bool {
        self.detached
    }

    /// Opens what the engine is given by descriptor, and makes the mounts of `--fuse`, whose connections it is given.
    ///
    /// # Errors
    /// If a descriptor is not open, or a mount cannot be made or would be on another one; the message names the option.
    pub fn adopt_descriptors(&mut self) -> Result<(), String> {
        for (number, key) in &self.inherit_fd {
            let fd = adopt("--inherit-fd", *number)?;
            self.engine.given.inherit_fd.push(InheritFd { fd, key: key.clone() });
        }
        FuseServer::check_places(&self.fuse)?;
        for server in &self.fuse {
            let new = server.connect().map_err(|error| error.to_string())?;
            self.engine.given.inherit_fd.push(new.connection.clone());
            self.engine.given.fuse.push(new);
        }
        if let Some(number) = self.ps_socket {
            self.page_server.socket = Some(adopt("--ps-socket", number)?);
        }
        if let Some(number) = self.lazy_socket {
            self.engine.memory.lazy_listener = Some(adopt("--lazy-socket", number)?);
        }
        Ok(())
    }

    /// Opens what this process itself is given by descriptor, and closes what `--close` names.
    ///
    /// # Errors
    /// As [`adopt_descriptors`](Self::adopt_descriptors).
    pub fn adopt_own_descriptors(&mut self) -> Result<(), String> {
        if let Some(number) = self.status_fd {
            self.ready_fd = Some(adopt("--status-fd", number)?);
        }
        for number in &self.close_fds {
            torpor_sys::inherited::close(*number).map_err(|e| format!("--close {number}: {e}"))?;
        }
        Ok(())
    }

    /// Merges the options that are spread over several places: the page server's,
    /// and the flags of the mounts that are found by themselves.
    ///
    /// # Errors
    /// If options contradict each other.
    pub fn merge(&mut self) -> Result<(), String> {
        if let Some(path) = self.address.as_deref().and_then(|to| to.strip_prefix("unix:")) {
            let stream = std::os::unix::net::UnixStream::connect(path)
                .map_err(|e| format!("--address unix:{path}: {e}"))?;
            self.page_server.socket = Some(Arc::new(stream.into()));
            self.address = None;
        }
        if self.use_page_server {
            self.engine.memory.page_server = Some(self.page_server());
        }
        if self.external_sharing || self.external_masters {
            let auto = self.engine.given.external.iter_mut().find_map(|external| match external {
                External::MntAuto { sharing, masters } => Some((sharing, masters)),
                _ => None,
            });
            let (sharing, masters) = auto.ok_or(
                "--enable-external-sharing and --enable-external-masters need --external mnt[]",
            )?;
            *sharing |= self.external_sharing;
            *masters |= self.external_masters;
        }
        Ok(())
    }

    /// Where the page server is, with its keys.
    #[must_use]
    pub fn page_server(&self) -> PageServer {
        let mut server = self.page_server.clone();
        server.address.clone_from(&self.address);
        server.tls = self.tls.then(|| self.tls_files.clone());
        server
    }
}

fn adopt(option: &str, number: i32) -> Result<Arc<OwnedFd>, String> {
    let fd = torpor_sys::inherited::duplicate(number)
        .map_err(|e| format!("{option}: descriptor {number}: {e}"))?;
    Ok(Arc::new(fd))
}
