//! What shows that an application is ready.

use std::fs;

use crate::place::{Place, shown};

#[test]
fn an_application_shows_that_it_is_ready() {
    let place = Place::new("ready", 50);
    let reference = place.reference();
    for ready in ["log:ready to .nswer", "exec:/app ask random", "notify"] {
        let output = place.try_create(&reference, &["--ready", ready]);
        assert!(output.status.success(), "{ready}: {}", shown(&output));
        place.run(&reference, "one", "snapshot", &[]);
        place.exec("one", &["/app", "ask", "page", "3"]);
        place.delete("one");
    }
}

/// A server, which is asked in the container's network.
#[test]
fn a_server_is_ready_when_it_answers() {
    let place = Place::new("server", 10);
    let reference = place.reference();
    fs::create_dir(place.path("bundle/rootfs/www")).unwrap();
    fs::write(place.path("bundle/rootfs/www/health"), "well").unwrap();
    let server = ["--", "/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/www"];
    let get = ["busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:8080/health"];
    for ready in ["http://127.0.0.1:8080/health", "tcp:8080"] {
        let words = [&["--ready", ready][..], &server].concat();
        let output = place.try_create(&reference, &words);
        assert!(output.status.success(), "{ready}: {}", shown(&output));
        place.run(&reference, "one", "snapshot", &[]);
        assert_eq!(place.exec("one", &get), "well");
        place.delete("one");
    }
    for ready in ["http://127.0.0.1:8080/absent", "tcp:8081"] {
        let words = [&["--ready", ready, "--timeout", "1"][..], &server].concat();
        let output = place.try_create(&reference, &words);
        assert!(shown(&output).contains(&format!("not ready ({ready})")), "{}", shown(&output));
    }
}

#[test]
fn one_that_does_not_become_ready_is_gone() {
    let place = Place::new("unready", 50);
    let reference = place.reference();
    let never = place.try_create(&reference, &["--ready", "exec:false", "--timeout", "1"]);
    assert!(shown(&never).contains("not ready (exec:false)"), "{}", shown(&never));
    let words = ["--ready", "notify", "--", "/bin/sh", "-c", "echo no use; exit 3"];
    let ended = place.try_create(&reference, &words);
    assert!(!ended.status.success());
    assert!(shown(&ended).contains("ended before it was ready"), "{}", shown(&ended));
    assert!(shown(&ended).contains("no use"), "{}", shown(&ended));
    let list = place.runc(&["list", "--quiet"]).output().unwrap();
    assert!(list.stdout.is_empty(), "{}", shown(&list));
}
