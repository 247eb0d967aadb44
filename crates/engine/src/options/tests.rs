//! What the options are read from.

use super::*;

#[test]
fn cgroup_roots() {
    let parse = |s: &str| s.parse::<CgroupRoot>();
    let root = |controller: Option<&str>, path: &str| CgroupRoot {
        controller: controller.map(str::to_owned),
        path: path.to_owned(),
    };
    assert_eq!(parse("/a/b"), Ok(root(None, "/a/b")));
    assert_eq!(parse("cpu,cpuacct:/x"), Ok(root(Some("cpu,cpuacct"), "/x")));
    // The name of a hierarchy without a controller holds no colon, its path may.
    assert_eq!(parse("name=systemd:/a:/b"), Ok(root(Some("name=systemd"), "/a:/b")));
    assert!(parse("relative").is_err());
}

#[test]
fn joined_namespaces() {
    let parse = |s: &str| s.parse::<JoinNs>();
    assert_eq!(
        parse("net:12345"),
        Ok(JoinNs { kind: JoinNsKind::Net, file: "/proc/12345/ns/net".into(), ids: None })
    );
    assert_eq!(
        parse("uts:/foo/bar"),
        Ok(JoinNs { kind: JoinNsKind::Uts, file: "/foo/bar".into(), ids: None })
    );
    assert_eq!(
        parse("user:7,1000,100"),
        Ok(JoinNs {
            kind: JoinNsKind::User,
            file: "/proc/7/ns/user".into(),
            ids: Some((1000, 100))
        })
    );
    assert!(parse("pid:7").is_err());
    assert!(parse("net").is_err());
    assert!(parse("net:7,1,1").is_err());
    assert!(parse("user:7,1").is_err());
}

#[test]
fn cpu_capabilities() {
    let parse = |s: &str| s.parse::<CpuCap>();
    assert_eq!(parse("all"), Ok(CpuCap::ALL));
    assert_eq!(parse("none"), Ok(CpuCap::NONE));
    assert_eq!(parse("fpu,ins"), Ok(CpuCap { fpu: true, cpu: false, ins: true }));
    assert_eq!(parse("all,^cpu"), Ok(CpuCap { fpu: true, cpu: false, ins: true }));
    assert!(parse("gpu").is_err());
    assert_eq!(CpuCap::from_bits(u32::MAX), CpuCap::ALL);
}
