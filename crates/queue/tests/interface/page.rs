//! The page, in a browser.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;
use torpor_runtimes_tests::port;

use super::common::browser::{self, Browser};
use super::common::{self, Daemon, shown, until};

/// A daemon with one slot that shows its page to a browser, and the address of that.
fn with_page(dir: &Path) -> (Daemon, String) {
    let tokens = json!([{ "token": "administrator-token", "owner": "root", "admin": true }]);
    let file = dir.join("tokens");
    std::fs::write(&file, tokens.to_string()).unwrap();
    let address = format!("http://127.0.0.1:{}", port::free());
    let options = ["--listen", &address, "--tokens", file.to_str().unwrap(), "--slots", "1"];
    (Daemon::start(&options), address)
}

/// The page as it stays open: a job is chosen, and what it writes then comes without being asked for. So does when it gives
/// way, and when it goes on.
#[test]
fn the_page_shows_live_what_a_job_writes() {
    if !browser::is_there("the_page_shows_live_what_a_job_writes") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (daemon, address) = with_page(dir.path());
    let go = daemon.dir.path().join("go");
    let script = format!(
        "echo first; until [ -e {} ]; do sleep 0.05; done; echo second >&2; sleep 1000",
        go.display()
    );
    let id = daemon.submit(&[], &["sh", "-c", &script]);
    daemon.wait_for_output(id, "first");
    let address = format!("{address}/#token=administrator-token&job={id}");
    let mut browser = Browser::open(&dir.path().join("profile"), &address);
    until("the first line", || (browser.text("log") == "first\n").then_some(()));
    assert_eq!(browser.text("title"), format!("Output of job {id}"));
    std::fs::write(go, "").unwrap();
    until("the second line", || (browser.text("log") == "first\nsecond\n").then_some(()));
    assert!(!browser.html("time").contains("--sleep"));
    daemon.ok(&["preempt", &id.to_string()]);
    until("it sleeps", || browser.html("time").contains("--sleep").then_some(()));
    until("its state", || browser.text("jobs").contains("preempted").then_some(()));
    daemon.ok(&["resume", &id.to_string()]);
    until("it runs after that", || {
        let time = browser.html("time");
        time.rsplit_once("--sleep").is_some_and(|(_, after)| after.contains("--run")).then_some(())
    });
    assert!(!browser.text("jobs").contains("cancelled"));
    daemon.ok(&["cancel", &id.to_string()]);
    until("its end", || browser.text("jobs").contains("cancelled").then_some(()));
}

/// The page, in a real browser: what it shows comes from the daemon and from nowhere else.
#[test]
fn the_page_in_a_browser() {
    let name = "the_page_in_a_browser";
    if !common::long(name) || !browser::is_there(name) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (daemon, address) = with_page(dir.path());
    let long = daemon.submit(&["--class", "batch"], &["sh", "-c", "echo a line; sleep 1000"]);
    daemon.wait_for_output(long, "a line");
    let urgent = daemon.submit(&["--class", "urgent"], &["sh", "-c", "sleep 1"]);
    daemon.wait_for(urgent, "done");
    let waits = daemon.submit(&["--class", "batch"], &["true"]);
    let browse = |what: &str, text: bool| {
        let mut browser = Command::new("chromium");
        browser
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
            .args([
                "--disable-dev-shm-usage",
                "--virtual-time-budget=8000",
                "--window-size=1100,700",
                // No other machine is to be found.
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                what,
            ])
            .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
            .arg(format!("{address}/#still=1&token=administrator-token"));
        let output = browser.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        if text { String::from_utf8_lossy(&output.stdout).into_owned() } else { String::new() }
    };
    let page = browse("--dump-dom", true);
    for word in ["1 of 1 slots", "running", "done", "queued", "waits for job 1", "<rect"] {
        assert!(page.contains(word), "{word} in {page}");
    }
    // Whose share is used, and what there is of memory and disk.
    for word in ["of memory free", "of disk free", "<td>/uid-0</td>"] {
        assert!(page.contains(word), "{word} in {page}");
    }
    assert!(!page.contains("https://") && !page.contains("src=\"http"), "{page}");
    daemon.ok(&["cancel", &waits.to_string()]);
    if let Some(picture) = std::env::var_os("TORPOR_SCREENSHOT") {
        browse(&format!("--screenshot={}", picture.to_str().unwrap()), false);
    }
}
