//! The user who restores has keys in the keyring of its session: the tasks have a keyring of their
//! own.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::process::{Command, Stdio};

mod sleeper;

use sleeper::{Sleeper, wait_until};

/// Calls keyctl(2) and add_key(2).
const KEYS: &str = "
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
def find():
    # KEYCTL_SEARCH in KEY_SPEC_SESSION_KEYRING.
    return libc.syscall(250, 10, -3, b'user', b'torpor-test', 0)
";
/// Looks, when it is asked, for the key.
const TASK: &str = "
os.chdir(sys.argv[1])
open('/proc/self/comm', 'w').write('sleep')
while not os.path.exists('ask'):
    time.sleep(0.05)
with open('answer.new', 'w') as answer:
    answer.write(str(find()))
os.rename('answer.new', 'answer')
time.sleep(1000)
";
/// Puts the key into the keyring of a new session, and becomes another program.
const KEEPER: &str = "
# KEYCTL_JOIN_SESSION_KEYRING
libc.syscall(250, 1, None)
libc.syscall(248, b'user', b'torpor-test', b'secret', 6, -3)
assert find() > 0
os.execv(sys.argv[1], ['criu'] + sys.argv[2:])
";

#[test]
fn the_keys_of_who_restores_stay_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_str().unwrap();
    let task = Sleeper::start_as(&["python3", "-c", &[KEYS, TASK].concat(), place]);
    task.put_to_sleep(&[]);
    let mut command = Command::new("python3");
    command.args(["-c", &[KEYS, KEEPER].concat()]).arg(task.restore(&["-d"]).get_program());
    let output = command.args(task.restore(&["-d"]).get_args()).stdin(Stdio::null()).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said} {}", task.log("restore.log"));
    fs::write(dir.path().join("ask"), "").unwrap();
    wait_until(|| dir.path().join("answer").exists());
    assert_eq!(fs::read_to_string(dir.path().join("answer")).unwrap(), "-1");
}
