//! Where a snapshot is: `dir:PATH[:NAME]`, `registry/name:tag` or `s3://bucket/prefix[:NAME]`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The name of a snapshot that was given none.
const LATEST: &str = "latest";

/// Where a snapshot is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// In a directory, which is an OCI image layout.
    Dir {
        /// The directory.
        path: PathBuf,
        /// The name in its index.
        name: String,
    },
    /// In an OCI registry.
    Registry {
        /// Host, and port if it is not the usual one.
        host: String,
        /// The name of the repository.
        repository: String,
        /// A tag, or the digest of a manifest.
        tag: String,
    },
    /// In an object store that speaks the protocol of S3: an OCI image layout below a prefix.
    S3 {
        /// The bucket.
        bucket: String,
        /// What the names of its objects start with; may be empty.
        prefix: String,
        /// The name in its index.
        name: String,
    },
}

impl Reference {
    /// Whether it is a directory of this machine: nothing has to come from elsewhere.
    #[must_use]
    pub fn is_near(&self) -> bool {
        matches!(self, Self::Dir { .. })
    }

    /// What has another name in the same place.
    #[must_use]
    pub fn beside(&self, other: &str) -> Self {
        let mut reference = self.clone();
        match &mut reference {
            Self::Dir { name, .. } | Self::S3 { name, .. } => other.clone_into(name),
            Self::Registry { tag, .. } => other.clone_into(tag),
        }
        reference
    }

    /// Whether both are in the same place, whatever their names are there.
    #[must_use]
    pub fn is_beside(&self, other: &Self) -> bool {
        self.absolute().beside("") == other.absolute().beside("")
    }

    /// The same with a name that leads to the same place from every directory.
    #[must_use]
    pub fn absolute(&self) -> Self {
        let mut reference = self.clone();
        if let Self::Dir { path, .. } = &mut reference
            && let Ok(absolute) = std::path::absolute(&path)
        {
            *path = absolute;
        }
        reference
    }
}

/// Splits `path:name`, the name being [`LATEST`] where there is none.
fn named(text: &str) -> (&str, &str) {
    match text.rsplit_once(':') {
        Some((path, name)) if !name.is_empty() && !name.contains('/') => (path, name),
        _ => (text, LATEST),
    }
}

/// Whether registries know it as a name: they have letters, digits, `_`, `-` and `.`, at most 128, and begin with none of the last two.
fn is_tag(tag: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    tag.len() <= 128 && !tag.starts_with(['-', '.']) && !tag.is_empty() && tag.chars().all(word)
}

/// Whether it is written as a digest is.
fn is_digest(text: &str) -> bool {
    let Some((algorithm, digits)) = text.split_once(':') else { return false };
    let word = |c: char| c.is_ascii_alphanumeric();
    !algorithm.is_empty()
        && algorithm.chars().all(|c| word(c) || "+._-".contains(c))
        && !digits.is_empty()
        && digits.chars().all(word)
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains(char::is_control) {
            return Err(format!("{text:?} has a control character"));
        }
        Self::of_any_name(text)
    }
}

impl Reference {
    /// That of a snapshot that is there, whatever its name is: earlier versions made some with control characters.
    ///
    /// # Errors
    /// In words: if it says neither a directory, nor a bucket, nor an image in a registry.
    pub fn of_any_name(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("dir:") {
            let (path, name) = named(rest);
            if path.is_empty() {
                return Err("dir: is followed by the path of a directory".to_owned());
            }
            return Ok(Self::Dir { path: path.into(), name: name.to_owned() });
        }
        if let Some(rest) = text.strip_prefix("s3://") {
            let (path, name) = named(rest);
            let (bucket, prefix) = path.split_once('/').unwrap_or((path, ""));
            if bucket.is_empty() {
                return Err("s3:// is followed by the name of a bucket".to_owned());
            }
            let prefix = prefix.trim_matches('/').to_owned();
            return Ok(Self::S3 { bucket: bucket.to_owned(), prefix, name: name.to_owned() });
        }
        let expected = "expected dir:PATH[:NAME], HOST/NAME:TAG or s3://BUCKET/PREFIX[:NAME]";
        let (host, path) = text.split_once('/').ok_or(expected)?;
        if host.is_empty() || !(host.contains(['.', ':']) || host == "localhost") {
            return Err(format!("{expected}; {host:?} is no host"));
        }
        let (repository, tag) = match path.split_once('@') {
            Some((repository, digest)) => (repository, digest),
            None => named(path),
        };
        let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-/".contains(c);
        if repository.is_empty() || !repository.chars().all(word) {
            return Err(format!("{expected}; {repository:?} is no name of a repository"));
        }
        let is_name = if path.contains('@') { is_digest(tag) } else { is_tag(tag) };
        if !is_name {
            return Err(format!("{expected}; {tag:?} is no tag and no digest"));
        }
        let (host, repository, tag) = (host.to_owned(), repository.to_owned(), tag.to_owned());
        Ok(Self::Registry { host, repository, tag })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir { path, name } => write!(f, "dir:{}:{name}", path.display()),
            Self::Registry { host, repository, tag } => {
                let mark = if tag.contains(':') { '@' } else { ':' };
                write!(f, "{host}/{repository}{mark}{tag}")
            }
            Self::S3 { bucket, prefix, name } if prefix.is_empty() => {
                write!(f, "s3://{bucket}:{name}")
            }
            Self::S3 { bucket, prefix, name } => write!(f, "s3://{bucket}/{prefix}:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_relative_one_leads_to_one_place() {
        let here = std::env::current_dir().unwrap();
        let absolute = |text: &str| text.parse::<Reference>().unwrap().absolute().to_string();
        assert_eq!(absolute("dir:a:v1"), format!("dir:{}/a:v1", here.display()));
        assert_eq!(absolute("dir:./a"), absolute("dir:a"));
        for other in ["dir:/a/b:v1", "localhost:5000/a/b:1.2", "s3://bucket/some/where:x"] {
            assert_eq!(absolute(other), other);
        }
    }

    #[test]
    fn names_in_one_place_are_beside_each_other() {
        let is = |a: &str, b: &str| {
            a.parse::<Reference>().unwrap().is_beside(&b.parse::<Reference>().unwrap())
        };
        assert!(is("dir:/a:v1", "dir:/a") && is("dir:a:v1", "dir:./a:v2"));
        assert!(is("h.example/a:v1", "h.example/a@sha256:0f") && is("s3://b/p:x", "s3://b/p"));
        for other in ["dir:/b:v1", "dir:/a/b:v1", "h.example/a:v1", "s3://a:v1"] {
            assert!(!is("dir:/a:v1", other), "{other}");
        }
        assert!(!is("h.example/a:v1", "h.example/b:v1") && !is("h.example/a", "i.example/a"));
        assert!(!is("s3://b/p:x", "s3://b/q:x") && !is("s3://b/p", "s3://c/p"));
    }

    #[test]
    fn references_say_where() {
        for (text, shown) in [
            ("dir:/a/b", "dir:/a/b:latest"),
            ("dir:a:v1", "dir:a:v1"),
            ("dir:/a:b/c", "dir:/a:b/c:latest"),
            ("localhost:5000/a/b:1.2", "localhost:5000/a/b:1.2"),
            ("registry.example.org/a", "registry.example.org/a:latest"),
            ("r.example/a@sha256:0f", "r.example/a@sha256:0f"),
            ("s3://bucket/some/where/:x", "s3://bucket/some/where:x"),
            ("s3://bucket", "s3://bucket:latest"),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), shown, "{text}");
        }
        for wrong in ["", "dir:", "s3://", "name", "name/x", "h.example/", "h.example/UP:x", "/x:y"]
        {
            assert!(wrong.parse::<Reference>().is_err(), "{wrong}");
        }
        let long = format!("h.example/a:{}", "x".repeat(129));
        for wrong in
            ["h.example/a:b c", "h.example/a:-x", "h.example/a@x", "h.example/a@:0f", &long]
        {
            let error = wrong.parse::<Reference>().unwrap_err();
            assert!(error.contains("is no tag and no digest"), "{wrong}: {error}");
        }
        for wrong in ["dir:/a:b\nc", "dir:/a\u{1b}[2J", "s3://b/c:\u{7}"] {
            let error = wrong.parse::<Reference>().unwrap_err();
            assert!(error.contains("has a control character"), "{error}");
            assert!(Reference::of_any_name(wrong).unwrap().to_string().starts_with(wrong));
        }
    }
}
