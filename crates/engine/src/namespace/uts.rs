//! UTS namespaces: host and domain name.

use std::os::fd::AsFd;

use torpor_images::proto::UtsnsEntry;
use torpor_images::{ImageDir, kind};
use torpor_policy::HostNames;

use super::{Namespaces, run_in};
use crate::error::{Context, Error, Result};

/// Writes `utsns-ID.img`.
///
/// # Errors
/// If the namespace cannot be entered; if a name is not text; if the image cannot be written.
pub(crate) fn dump(images: &ImageDir, spaces: &Namespaces, ns_id: u32) -> Result<()> {
    let names = run_in(&[spaces.open_file(ns_id)?], || Ok(rustix::system::uname()))?;
    let text = |name: &std::ffi::CStr| {
        let reason = |_| Error::invalid("uname", "a name of the UTS namespace is not text");
        name.to_str().map(str::to_owned).map_err(reason)
    };
    let entry =
        UtsnsEntry { nodename: text(names.nodename())?, domainname: text(names.domainname())? };
    Ok(images.write_one(kind::UTSNS, ns_id.into(), &entry)?)
}

/// Sets the names.
///
/// # Errors
/// If the namespace is none that is made, cannot be entered, or does not take a name.
pub(crate) fn restore(spaces: &Namespaces, ns_id: u32) -> Result<()> {
    let HostNames { host, domain, .. } = spaces.filling.names(ns_id)?;
    run_in(&[spaces.open_file(ns_id)?.as_fd()], || {
        rustix::system::sethostname(host.as_bytes()).context(|| format!("sethostname {host:?}"))?;
        rustix::system::setdomainname(domain.as_bytes())
            .context(|| format!("setdomainname {domain:?}"))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::namespace::NsKind;
    use crate::namespace::filling::Filling;
    use crate::namespace::testing::{fresh, tree};

    #[test]
    fn names_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let old = fresh(NsKind::Uts);
        run_in(&[old.as_fd()], || {
            rustix::system::sethostname(b"some.host").unwrap();
            rustix::system::setdomainname(b"a domain").unwrap();
            Ok(())
        })
        .unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        dump(&images, &tree(NsKind::Uts, vec![old]), 1).unwrap();
        let new = fresh(NsKind::Uts);
        let images = ImageDir::open(dir.path()).unwrap();
        let mut files = tree(NsKind::Uts, vec![new.try_clone().unwrap()]);
        files.filling = Filling::read(&images, files.filled()).unwrap();
        restore(&files, 1).unwrap();
        let names = run_in(&[new.as_fd()], || Ok(rustix::system::uname())).unwrap();
        assert_eq!(names.nodename(), c"some.host");
        assert_eq!(names.domainname(), c"a domain");
    }
}
