//! Lazy migration as two runcs do it: a container runs elsewhere while its memory is still here.

use std::fs;
use std::path::PathBuf;
use std::process::Child;

use crate::command::{Run, command, wait};
use crate::port;
use crate::runc::Container;
use crate::scratch::Scratch;
use crate::wait::until_true;

/// A container that stands still, and whose memory is served.
#[derive(Debug)]
pub struct Leaving {
    checkpoint: Child,
    images: PathBuf,
    port: u16,
}

impl Leaving {
    /// Checkpoints all but the memory. The descriptor says when that has been done.
    pub fn begin(container: &Container<'_>, here: &Scratch, options: &[&str]) -> Self {
        let port = port::free();
        let call = container.checkpoint_call(&["--lazy-pages", "--status-fd", "3"]);
        let mut checkpoint = here.command("sh");
        checkpoint.args(["-c", "exec \"$@\" 3> status", "sh"]).current_dir(here.join("."));
        checkpoint.arg(call.get_program()).args(call.get_args()).args(options);
        checkpoint.args(["--page-server", &format!("127.0.0.1:{port}"), container.id()]);
        let checkpoint = checkpoint.spawn().unwrap();
        let status = here.join("status");
        until_true("pages are served", || fs::read(&status).is_ok_and(|status| status == [0]));
        Leaving { checkpoint, images: here.join("images"), port }
    }

    /// Restores it as `moved`, which fetches the memory. Here it is gone then.
    pub fn arrive(mut self, moved: &mut Container<'_>, there: &Scratch, options: &[&str]) {
        command("cp", &["-a"]).arg(self.images.join(".")).arg(there.join("images")).succeed();
        let mut daemon = there.command(there.criu().to_str().unwrap());
        daemon.args(["lazy-pages", "--page-server", "--address", "127.0.0.1", "--port"]);
        daemon.arg(self.port.to_string()).arg("-D").arg(there.join("images"));
        daemon.arg("-W").arg(there.dir("work"));
        let mut daemon = daemon.spawn().unwrap();
        until_true("the pager listens", || there.join("work/lazy-pages.socket").exists());
        moved.restore(&[&["--lazy-pages"], options].concat());
        assert!(wait(&mut self.checkpoint).expect("the checkpoint ends").success());
        assert!(wait(&mut daemon).expect("the pager ends").success());
    }
}
