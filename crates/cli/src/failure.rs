//! What went wrong, for a person and for an RPC client.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe, catch_unwind};

use torpor_engine::Error;
use torpor_seal::keys;
use torpor_worker::{Class, Outcome};

use crate::log::escaped;

/// An operation that did not work out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What happened, in a sentence.
    pub text: String,
    /// What to try.
    pub hint: Option<String>,
    /// What to try, which the text ends with.
    pub advice: Option<String>,
    /// The number nearest to it, for the RPC's `cr_errno`.
    pub errno: i32,
    /// In which way it failed, for programs.
    pub class: Class,
    /// It stands in the log already, or has been said.
    pub logged: bool,
    /// The exit status.
    pub status: u8,
}

impl Failure {
    /// A failure of the kind `errno`.
    pub fn new(errno: i32, text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            hint: None,
            advice: None,
            errno,
            class: Class::Kernel,
            logged: false,
            status: 1,
        }
    }

    /// A request that makes no sense.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, text).class(Class::Usage)
    }

    /// Something that there is no support for.
    pub fn unsupported(text: impl Into<String>) -> Self {
        Self::new(libc::EOPNOTSUPP, text).class(Class::Refused)
    }

    fn class(mut self, class: Class) -> Self {
        self.class = class;
        self
    }

    /// An operation of the kernel that failed.
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        let failure =
            Self::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}"));
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => failure.hint(PRIVILEGES),
            _ => failure,
        }
    }

    /// Adds what to try.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// What `work` returns, or that it has panicked.
///
/// # Errors
/// Those of `work`; what it prints and cannot be written; class bug if it panics for another reason: where,
/// stands on standard error then.
pub fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // Nothing that it has changed is looked at any more.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let panic = &*panic;
        match unwritten(panic) {
            Some(why) => {
                let failure = Failure::new(libc::EIO, format!("standard output: {why}"));
                // A reader that goes away has seen enough.
                let is_gone = why == io::Error::from_raw_os_error(libc::EPIPE).to_string();
                Err(Failure { logged: is_gone, ..failure })
            }
            None => {
                let words = words(panic).unwrap_or("no word");
                Err(Error::Bug(format!("panic: {words}")).into())
            }
        }
    })
}

/// Panics that tell of an output that cannot be written say nothing by themselves: [`caught`] does.
pub(crate) fn quiet_about_output() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if unwritten(info.payload()).is_none() {
            usual(info);
        }
    }));
}

/// What a panic says.
fn words(panic: &(dyn Any + Send)) -> Option<&str> {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    words.or_else(|| panic.downcast_ref::<&str>().copied())
}

/// Why `println!` could not write, if that is what a panic is about.
fn unwritten(panic: &(dyn Any + Send)) -> Option<&str> {
    words(panic)?.strip_prefix("failed printing to stdout: ")
}

const REPORT: &str = "report it, with the log of the same with -v4";
const PRIVILEGES: &str = "run it as root, or with --unprivileged and CAP_CHECKPOINT_RESTORE";

/// The lines of an error's text. Those that list something have a line for each, which begins with two spaces; any other
/// end of a line, and what a terminal would obey, is of a name.
pub fn lines(text: &str) -> Vec<String> {
    let mut parts = text.split("\n  ").map(escaped);
    let first = parts.next();
    first.into_iter().chain(parts.map(|part| format!("  {part}"))).collect()
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}

impl From<Outcome> for Failure {
    fn from(Outcome { class, errno, text, hint, report: _ }: Outcome) -> Self {
        Self { hint, ..Self::new(errno, text).class(class) }
    }
}

impl From<torpor_crit::Error> for Failure {
    fn from(error: torpor_crit::Error) -> Self {
        use torpor_crit::Error as Crit;
        let text = error.to_string();
        match error {
            Crit::Image(error) => Error::from(error).into(),
            Crit::Keys(error) => error.into(),
            Crit::Io { file, source } => Self::io(file.display(), &source),
            Crit::Json { .. } | Crit::Syntax { .. } => Self::invalid(text),
            _ => Self::new(libc::EBADMSG, text).class(Class::BadImage),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match &error {
            Error::Os { what, source } => Self::io(what, source),
            Error::Gone { .. } => Self::new(libc::ESRCH, text),
            Error::Refused { .. } | Error::Unsupported(_) => {
                let advice = error.advice().map(str::to_owned);
                Self { advice, ..Self::unsupported(text) }
            }
            Error::Image(torpor_images::Error::Seal {
                source: torpor_seal::Error::Keys(error),
                ..
            }) => Self::new(key_errno(error), text).class(Class::Forbidden),
            Error::Image(torpor_images::Error::Seal { .. }) => Self::new(libc::EBADMSG, text)
                .class(Class::BadImage)
                .hint("they are not what was sealed: use another copy of the images"),
            Error::Image(torpor_images::Error::Io { source, .. }) => {
                Self::new(source.raw_os_error().unwrap_or(libc::EIO), text)
            }
            Error::Image(torpor_images::Error::BadMagic { .. }) => Self::new(libc::EBADMSG, text)
                .class(Class::BadImage)
                .hint("torpor image info FILE says what kind of image a file is"),
            Error::Invalid { .. } | Error::Image(_) | Error::Unreadable(_) => {
                Self::new(libc::EBADMSG, text).class(Class::BadImage)
            }
            Error::Forbidden { .. } => Self::new(libc::EPERM, text)
                .class(Class::Forbidden)
                .hint("torpor image audit DIR shows all that images ask for"),
            Error::Keys(error) => Self::new(key_errno(error), text).class(Class::Forbidden),
            Error::Hook(_) => Self::new(libc::ECANCELED, text).class(Class::Vetoed),
            Error::Peer(_) => Self::new(libc::ECONNRESET, text).class(Class::PeerLost),
            Error::Protocol(_) => Self::new(libc::EPROTO, text).class(Class::Protocol),
            Error::Usage(_) => Self::new(libc::EINVAL, text).class(Class::Usage),
            Error::Bug(_) => Self::new(libc::EIO, text).class(Class::Bug).hint(REPORT),
            Error::Seal(_) | Error::Tracee(_) | Error::Program { .. } => Self::new(libc::EIO, text),
        }
    }
}

impl From<keys::KeyError> for Failure {
    fn from(error: keys::KeyError) -> Self {
        Self::new(key_errno(&error), error.to_string()).class(Class::Forbidden)
    }
}

/// The kernel's numbers for what can be wrong with keys.
fn key_errno(error: &keys::KeyError) -> i32 {
    match error {
        keys::KeyError::File { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        keys::KeyError::NoIdentity | keys::KeyError::NotForUs { .. } => libc::ENOKEY,
        keys::KeyError::Expired { .. } | keys::KeyError::NotYetValid { .. } => libc::EKEYEXPIRED,
        keys::KeyError::Revoked { .. } => libc::EKEYREVOKED,
        keys::KeyError::Late { .. } => libc::ETIMEDOUT,
        keys::KeyError::Spec { .. } | keys::KeyError::Content { .. } => libc::EINVAL,
        _ => libc::EKEYREJECTED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_has_a_class_and_a_number() {
        let text = || "why".to_owned();
        let kernel = io::Error::from_raw_os_error(libc::ENOSPC);
        let seal = torpor_images::Error::Seal {
            dir: "images".into(),
            source: torpor_seal::Error::damaged("pages-1.img", "no"),
        };
        let all = [
            (Error::Gone { pid: 1 }, Class::Kernel, libc::ESRCH),
            (Error::refused(1, "fd 5", "no"), Class::Refused, libc::EOPNOTSUPP),
            (Error::Unsupported(text()), Class::Refused, libc::EOPNOTSUPP),
            (Error::Os { what: text(), source: kernel }, Class::Kernel, libc::ENOSPC),
            (Error::Image(seal), Class::BadImage, libc::EBADMSG),
            (Error::invalid("core-1.img", "no"), Class::BadImage, libc::EBADMSG),
            (Error::Unreadable(text()), Class::BadImage, libc::EBADMSG),
            (
                Error::Forbidden { violations: vec![], allowing: vec![] },
                Class::Forbidden,
                libc::EPERM,
            ),
            (Error::Hook(text()), Class::Vetoed, libc::ECANCELED),
            (Error::Peer(text()), Class::PeerLost, libc::ECONNRESET),
            (Error::Protocol(text()), Class::Protocol, libc::EPROTO),
            (Error::Usage(text()), Class::Usage, libc::EINVAL),
            (Error::Program { program: text(), reason: text() }, Class::Kernel, libc::EIO),
            (Error::Bug(text()), Class::Bug, libc::EIO),
        ];
        for (error, class, errno) in all {
            let words = error.to_string();
            let failure = Failure::from(error);
            assert_eq!((failure.class, failure.errno), (class, errno), "{words}");
            assert_eq!(failure.text, words);
        }
    }

    #[test]
    fn no_name_makes_a_line_of_its_own() {
        let text = "not allowed:\n  open \"/a\"\n  open \"/b\"";
        assert_eq!(lines(text), ["not allowed:", "  open \"/a\"", "  open \"/b\""]);
        let forged = "open /x\x1b[2J\nError (work.rs:1): all is well: No such file";
        assert_eq!(
            lines(forged),
            ["open /x\\u{1b}[2J\\nError (work.rs:1): all is well: No such file"]
        );
    }

    #[test]
    fn a_panic_is_a_bug() {
        let failure = caught::<()>(|| panic!("it is {}", 7)).err();
        let failure = failure.map(|failure| (failure.class, failure.text));
        let text = "panic: it is 7; this is a bug of Torpor".to_owned();
        assert_eq!(failure, Some((Class::Bug, text)));
        assert_eq!(caught(|| Ok(3)), Ok(3));
    }
}
