//! The programs of the zoo and what their header comments say of them.

use anyhow::{Context, Result, bail, ensure};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How a program is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Without any checkpoint: shows that the program itself is right.
    None,
    /// On the host: dumped, gone, restored under the same process ids.
    Plain,
    /// Dumped with `--leave-running`, verified, then restored as well.
    LeaveRunning,
    /// The same, with memory that is copied when the tasks run on.
    Cow,
    /// Dumped after two rounds of pre-dumps, with the pages that changed since.
    Rounds,
    /// Restored lazily: it runs while its memory is brought in.
    Lazy,
    /// Dumped with compressed memory.
    Compressed,
    /// Restored from images without anything that only Torpor writes.
    Foreign,
    /// Under an init in a pid and a mount namespace.
    PidNs,
    /// As a container: pid, mount, network, IPC, UTS and cgroup namespaces.
    Ns,
    /// The same, with sealed images.
    Sealed,
    /// As a container in a user namespace.
    UserNs,
}

impl Mode {
    /// All modes, in the order in which they are run and shown.
    pub const ALL: [Self; 12] = [
        Self::None,
        Self::Plain,
        Self::LeaveRunning,
        Self::Cow,
        Self::Rounds,
        Self::Lazy,
        Self::Compressed,
        Self::Foreign,
        Self::PidNs,
        Self::Ns,
        Self::Sealed,
        Self::UserNs,
    ];

    /// The namespaces that the launcher makes for a program in this mode; empty on the host.
    #[must_use]
    pub fn namespaces(self) -> &'static str {
        match self {
            Self::None
            | Self::Plain
            | Self::LeaveRunning
            | Self::Cow
            | Self::Rounds
            | Self::Lazy
            | Self::Compressed
            | Self::Foreign => "",
            Self::PidNs => "pid,mnt",
            Self::Ns | Self::Sealed => "pid,mnt,net,ipc,uts,cgroup",
            Self::UserNs => "pid,mnt,net,ipc,uts,cgroup,user",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Plain => "plain",
            Self::LeaveRunning => "leave-running",
            Self::Cow => "cow",
            Self::Rounds => "rounds",
            Self::Lazy => "lazy",
            Self::Compressed => "compressed",
            Self::Foreign => "foreign",
            Self::PidNs => "pidns",
            Self::Ns => "ns",
            Self::Sealed => "sealed",
            Self::UserNs => "userns",
        })
    }
}

impl FromStr for Mode {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|mode| mode.to_string() == text);
        found.with_context(|| format!("no such mode: {text}"))
    }
}

/// A program and its metadata.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// The file's stem, which is the program's name.
    pub name: String,
    /// The source file.
    pub source: PathBuf,
    /// The area of behaviour, a row group in the compatibility table.
    pub area: String,
    /// What the program shows, in a sentence.
    pub shows: String,
    /// Modes that the program is dumped in, the first being the home of mode `none`.
    pub modes: Vec<Mode>,
    /// Options for the dump, beside the usual ones.
    pub dump: Vec<String>,
    /// Options for the restore, beside the usual ones.
    pub restore: Vec<String>,
    /// Text that the log of a dump must hold that has to be refused.
    pub refused: Option<String>,
    /// Text that a warning in the log of a dump must hold.
    pub warns: Vec<String>,
    /// Whether images suffice that have nothing that only Torpor writes.
    pub foreign: bool,
    /// Kinds of observation that may differ when they have nothing else: `foreign: yes exit-code`.
    pub foreign_varies: Vec<String>,
    /// What the machine must offer, checked before the program runs.
    pub needs: Vec<String>,
    /// Why Torpor does not keep this; the dump has to be refused.
    pub unsupported: Option<String>,
    /// Kinds of observation that may differ after the restore.
    pub varies: Vec<String>,
    /// Files that others add a line to while the program is away.
    pub grows: Vec<String>,
    /// Files of the host that a container gets as well, with the libraries that they need.
    pub files: Vec<String>,
    /// Further arguments for the compiler.
    pub build: Vec<String>,
    /// Further namespaces for the modes that make some.
    pub namespaces: Vec<String>,
}

impl Program {
    /// Whether its behaviour can depend on how its pages are saved.
    fn is_about_memory(&self) -> bool {
        const AREAS: [&str; 8] = [
            "asynchronous I/O",
            "memory",
            "shared memory",
            "copy-on-write",
            "vDSO",
            "process tree",
            "threads",
            "32-bit programs",
        ];
        AREAS.contains(&self.area.as_str())
    }
}

/// The repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// Reads all programs, sorted by name.
///
/// # Errors
/// A source whose header is not understood.
pub fn all() -> Result<Vec<Program>> {
    let dir = repository().join("zoo");
    let mut programs = Vec::new();
    for entry in std::fs::read_dir(&dir).with_context(|| format!("{}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "c") {
            programs.push(parse(&path).with_context(|| format!("{}", path.display()))?);
        }
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

/// The program of that name.
///
/// # Errors
/// There is none.
pub fn find(name: &str) -> Result<Program> {
    // Each case asks in a process of its own: the others need not be read.
    let path = repository().join("zoo").join(format!("{name}.c"));
    ensure!(path.exists(), "no such program in the zoo");
    parse(&path)
}

fn parse(path: &Path) -> Result<Program> {
    let text = std::fs::read_to_string(path)?;
    let name = path.file_stem().and_then(|stem| stem.to_str()).context("file name")?;
    let mut program =
        Program { name: name.to_owned(), source: path.to_owned(), ..Program::default() };
    // What the header names, and does not only leave out, is tried wherever its area lies.
    let mut named: Vec<Mode> = Vec::new();
    let mut told_foreign = false;
    for (key, value) in header(&text)? {
        let words = || value.split_whitespace().map(str::to_owned);
        match key.as_str() {
            "area" => program.area = value,
            "shows" => program.shows = value,
            "modes" => {
                program.modes = modes(&value)?;
                named.extend(value.split_whitespace().filter_map(|word| word.parse::<Mode>().ok()));
            }
            "options" => {
                program.dump.extend(words());
                program.restore.extend(words());
            }
            "dump" => program.dump.extend(words()),
            "restore" => program.restore.extend(words()),
            "expect" => program.refused = Some(refusal(&value)?),
            "warns" => program.warns.push(value),
            "foreign" => {
                program.foreign = words().next().as_deref() == Some("yes");
                told_foreign = program.foreign || words().count() > 1;
                // Else: the reason.
                let varies = words().skip(1).filter(|_| program.foreign);
                program.foreign_varies.extend(varies);
            }
            "needs" => program.needs.extend(words()),
            "unsupported" => program.unsupported = Some(value),
            "varies" => program.varies.extend(words()),
            "files" => program.files.extend(words()),
            "grows" => {
                program.varies.extend(words());
                program.grows.extend(words());
            }
            "build" => program.build.extend(words()),
            "namespaces" => program.namespaces.extend(words()),
            _ => bail!("unknown key in the header: {key}"),
        }
    }
    if program.area.is_empty() || program.shows.is_empty() {
        bail!("the header must say its area and what it shows");
    }
    if program.modes.is_empty() {
        program.modes = modes("")?;
    }
    // Whichever modes the header names.
    if program.foreign && !program.modes.contains(&Mode::Foreign) {
        program.modes.push(Mode::Foreign);
    }
    let refused = program.refused.is_some() || program.unsupported.is_some();
    if !refused && !told_foreign && program.modes.contains(&Mode::Plain) {
        bail!(
            "the header must say whether images of CRIU's form do: foreign: yes, or foreign: no REASON"
        );
    }
    let rounds = !refused && program.is_about_memory();
    let leaves = program.modes.contains(&Mode::LeaveRunning);
    let sealed = !refused && program.modes.contains(&Mode::Ns);
    program.modes.retain(|mode| match mode {
        Mode::Rounds | Mode::Lazy | Mode::Compressed => rounds || named.contains(mode),
        Mode::Cow => rounds && leaves,
        Mode::Sealed => sealed,
        Mode::Foreign => program.foreign,
        _ => true,
    });
    Ok(program)
}

/// The `// key: value` lines at the start of a source; a line indented further goes on the last one.
fn header(text: &str) -> Result<Vec<(String, String)>> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.lines().map_while(|line| line.strip_prefix("// ")) {
        if line.starts_with(' ') {
            let (_, value) =
                fields.last_mut().context("the header starts with an indented line")?;
            value.push(' ');
            value.push_str(line.trim());
        } else {
            let (key, value) = line.split_once(": ").context("a header line without key")?;
            fields.push((key.to_owned(), value.trim().to_owned()));
        }
    }
    Ok(fields)
}

/// Either the modes by name, or those to leave out (`-userns`).
fn modes(list: &str) -> Result<Vec<Mode>> {
    let (mut named, mut left_out) = (Vec::new(), vec![Mode::None]);
    for word in list.split_whitespace() {
        match word.strip_prefix('-') {
            Some(mode) => left_out.push(mode.parse()?),
            None => named.push(word.parse()?),
        }
    }
    if named.is_empty() {
        named.extend(Mode::ALL.into_iter().filter(|mode| !left_out.contains(mode)));
    }
    Ok(named)
}

fn refusal(value: &str) -> Result<String> {
    let text = value.strip_prefix("refused \"").and_then(|rest| rest.strip_suffix('"'));
    Ok(text.context("expect: refused \"text\"")?.to_owned())
}
