//! Descriptors that a runtime gives for files of the tasks, by what a file among the images says.

use std::fs;
use std::process::Command;

use serde_json::json;
use torpor_images::proto::{FdTypes, RegFileEntry};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::scratch::Scratch;

use super::{Asleep, FOREIGN, Images, bundle};

/// A call by a program that has left a file and the root of this host open, as some versions of runc do.
fn with_files_open(call: &Command) -> Command {
    let mut shell = command("sh", &["-c", "exec 8</proc/version 9</ \"$@\"", "sh"]);
    shell.arg(call.get_program()).args(call.get_args());
    shell.envs(call.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.current_dir(call.get_current_dir().unwrap());
    shell
}

/// runc gives the descriptor of each number at which `descriptors.json` has a name with `pipe:` in it. It has passed on the standard
/// three: others are the restoring program's own, the directory of the images on this host among them, or those of whoever has
/// called runc.
#[test]
fn descriptors_that_nobody_has_passed_on() {
    let scratch = Scratch::new("images-descriptors");
    scratch.configure(FOREIGN);
    let bundle = bundle(&scratch);
    let asleep = Asleep::of(&scratch, &bundle);
    let (images, whole) = (scratch.join("images"), scratch.join("whole"));
    command("cp", &["-a"]).arg(&images).arg(&whole).succeed();
    Images::of(&scratch).open(FdTypes::Reg, |entry| {
        let name = b"/pipe:x".to_vec();
        entry.reg = Some(RegFileEntry { id: entry.id, name, ..RegFileEntry::default() });
    });
    let id = asleep.container.id();
    for number in 3..16 {
        let mut names = vec![""; number];
        names.push("pipe:x");
        fs::write(images.join("descriptors.json"), json!(names).to_string()).unwrap();
        let mut call = asleep.container.restore_call(&[]);
        with_files_open(call.args(["--detach", id])).fail();
        asleep.container.runc("state").arg(id).fail();
    }
    fs::remove_dir_all(&images).unwrap();
    fs::rename(&whole, &images).unwrap();
    asleep.wakes();
}
