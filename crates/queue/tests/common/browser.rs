//! A real browser that shows one page, asked over Chromium's own protocol on a pipe.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// Whether Chromium is there; says by name which test is left out where it is not.
pub fn is_there(test: &str) -> bool {
    let answer = Command::new("chromium").arg("--version").output();
    let there = answer.is_ok_and(|output| output.status.success());
    if !there {
        println!("{test}: left out, chromium is not there");
    }
    there
}

/// A headless Chromium with one page. It ends with the test.
pub struct Browser {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    calls: u64,
    session: Option<String>,
}

impl Browser {
    /// Opens a page; what the browser keeps is in `profile`.
    pub fn open(profile: &Path, address: &str) -> Self {
        let mut child = Command::new("sh")
            // It listens on descriptor 3 and answers on 4.
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh", "chromium"])
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .arg("--remote-debugging-pipe")
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let from = BufReader::new(from);
        let mut browser = Self { child, to, from, calls: 0, session: None };
        let page = browser.call("Target.createTarget", &json!({ "url": address }));
        let page = json!({ "targetId": page["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", &page);
        browser.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        browser
    }

    /// The text of an element of the page.
    pub fn text(&mut self, id: &str) -> String {
        self.ask(id, "textContent")
    }

    /// What is inside of an element of the page.
    pub fn html(&mut self, id: &str) -> String {
        self.ask(id, "innerHTML")
    }

    /// A property of an element, of text; empty while the page has no such element, or is about to be
    /// shown.
    fn ask(&mut self, id: &str, property: &str) -> String {
        let expression = format!("document.getElementById({id:?})?.{property} ?? ''");
        let answer = self.answer("Runtime.evaluate", &json!({ "expression": expression }));
        // Nobody answers what was asked of the empty page that it takes the place of.
        let Some(Ok(answer)) = answer else { return String::new() };
        answer["result"]["value"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    fn call(&mut self, method: &str, params: &Value) -> Value {
        let answer = self.answer(method, params);
        let answer = answer.unwrap_or_else(|| panic!("{method}: the browser has ended"));
        answer.unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// What the browser answers, or its error; nothing if it has ended.
    fn answer(&mut self, method: &str, params: &Value) -> Option<Result<Value, Value>> {
        self.calls += 1;
        let mut call = json!({ "id": self.calls, "method": method, "params": params });
        if let Some(session) = &self.session {
            call["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{call}\0").as_bytes()).ok()?;
        loop {
            let mut answer = Vec::new();
            self.from.read_until(0, &mut answer).ok()?;
            answer.pop().filter(|&end| end == 0)?;
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            // What has no such number is news.
            if answer["id"] == self.calls {
                let error = &answer["error"];
                let is_good = error.is_null();
                return Some(
                    is_good.then(|| answer["result"].clone()).ok_or_else(|| error.clone()),
                );
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.session = None;
        if !std::thread::panicking() {
            // It may have ended before it answers.
            self.answer("Browser.close", &json!({}));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
