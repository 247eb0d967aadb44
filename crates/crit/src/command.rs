//! The command lines: `crit …` and `torpor image …`.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use serde_json::{Map, Value as Json, json};
use torpor_images::{ImageDir, Kind, Reader, kind};
use torpor_seal::keys::Identities;

use crate::discard::{Discard, MadeHere};
use crate::error::{Error, Result};
use crate::explore::{What, explore, explored};
use crate::image::{View, decode, decode_file, encode, entries, info, summary};
use crate::sealed::{self, Rewrap};
use crate::text::to_string;

/// The subcommands of `torpor image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Show an image, or all images of a checkpoint, as JSON for people
    Show(Show),
    /// Say what kind of image it is and how many entries it has
    Info {
        /// The image, or the directory of a checkpoint
        file: PathBuf,
        /// Print it on one line, and a failure as an object as well
        #[arg(long)]
        json: bool,
        /// What opens it
        #[command(flatten)]
        keys: Keys,
    },
    /// Turn an image into JSON
    Decode(Decode),
    /// Turn JSON into an image
    Encode(Encode),
    /// Show the process tree of a checkpoint
    Ps(Explore),
    /// Show the descriptors of each process of a checkpoint
    Fds(Explore),
    /// Show the memory areas of each process of a checkpoint
    Mems(Explore),
    /// Show which pages of each process are in the images
    Rss(Explore),
    /// Change for whom a checkpoint is sealed; its memory is not touched
    Rewrap(Rewrap),
    /// Throw a checkpoint away, with the names that its dump has given to files (link_remap.N)
    Discard(Discard),
}

/// How sealed images are opened.
#[derive(Args, Debug)]
pub struct Keys {
    /// Open sealed images with KEY: a file with a private key, or provider:/PROGRAM or provider:/PROGRAM:KEY
    /// (default: those of the configuration files); may be given several times
    #[arg(long = "identity", value_name = "KEY")]
    identities: Vec<String>,
}

impl Keys {
    /// Those that are given, else those of the configuration files.
    pub(crate) fn identities(&self, defaults: &Identities) -> Result<Identities> {
        if self.identities.is_empty() {
            return Ok(defaults.clone());
        }
        Ok(Identities::new(&self.identities)?)
    }
}

/// The arguments of what looks at a whole checkpoint.
#[derive(Args, Debug)]
pub struct Explore {
    /// The directory of the images
    dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    keys: Keys,
}

/// The arguments of `show`.
#[derive(Args, Debug)]
pub struct Show {
    /// The image, or the directory of a checkpoint
    path: PathBuf,
    /// Do not show the data behind entries, only its size
    #[arg(long)]
    nopl: bool,
    #[command(flatten)]
    keys: Keys,
}

/// The arguments of `decode`.
#[derive(Args, Debug)]
pub struct Decode {
    /// Use many lines, and show numbers in the form that suits their field
    #[arg(long)]
    pretty: bool,
    /// The image (standard input by default)
    #[arg(short, long = "in", value_name = "IN")]
    input: Option<PathBuf>,
    /// Where the JSON goes (standard output by default)
    #[arg(short, long = "out", value_name = "OUT")]
    output: Option<PathBuf>,
    #[command(flatten)]
    keys: Keys,
}

/// The arguments of `encode`.
#[derive(Args, Debug)]
pub struct Encode {
    /// The JSON (standard input by default)
    #[arg(short, long = "in", value_name = "IN")]
    input: Option<PathBuf>,
    /// Where the image goes (standard output by default)
    #[arg(short, long = "out", value_name = "OUT")]
    output: Option<PathBuf>,
}

/// CRiu Image Tool
#[derive(Debug, Parser)]
#[command(name = "crit", version, disable_help_subcommand = true)]
struct Crit {
    #[command(subcommand)]
    command: Option<CritCommand>,
}

#[derive(Debug, Subcommand)]
enum CritCommand {
    /// Convert an image from binary to JSON
    Decode(Decode),
    /// Convert an image from JSON to binary
    Encode(Encode),
    /// Show info about an image
    Info {
        /// The image
        #[arg(value_name = "in")]
        file: PathBuf,
        #[command(flatten)]
        keys: Keys,
    },
    /// Explore an image directory
    X {
        /// The directory of the images
        dir: PathBuf,
        /// What to show
        what: What,
        #[command(flatten)]
        keys: Keys,
    },
    /// Convert an image from binary to human-readable JSON
    Show(Show),
}

/// Runs `torpor image`; `defaults` are the identities of the configuration files.
///
/// # Errors
/// Images that are damaged or no key opens; files that cannot be read or written.
pub fn run(
    command: ImageCommand,
    defaults: &Identities,
    made_here: MadeHere<'_>,
) -> Result<ExitCode> {
    let shown =
        |args: &Explore, what| explore_command(&args.dir, what, args.json, &args.keys, defaults);
    let out = &mut io::stdout();
    read(match command {
        ImageCommand::Show(args) => show(&args, defaults),
        ImageCommand::Info { file, json, keys } => print_info(&file, !json, &keys, defaults),
        ImageCommand::Decode(args) => decode_command(&args, defaults),
        ImageCommand::Encode(args) => encode_command(&args),
        ImageCommand::Ps(args) => shown(&args, What::Ps),
        ImageCommand::Fds(args) => shown(&args, What::Fds),
        ImageCommand::Mems(args) => shown(&args, What::Mems),
        ImageCommand::Rss(args) => shown(&args, What::Rss),
        ImageCommand::Rewrap(args) => args.run(defaults, out),
        ImageCommand::Discard(args) => args.run(defaults, made_here, out),
    })
}

/// Runs `crit` with its own command line, whose first word is the program's
/// name; `defaults` are the identities of the configuration files.
#[must_use]
pub fn crit(args: impl IntoIterator<Item = OsString>, defaults: &Identities) -> ExitCode {
    let args = match Crit::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            // Fails only if nobody reads it.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let result = match args.command {
        None => {
            eprintln!("{}", Crit::command().render_usage());
            eprintln!("crit: error: too few arguments");
            return ExitCode::FAILURE;
        }
        Some(CritCommand::Decode(args)) => decode_command(&args, defaults),
        Some(CritCommand::Encode(args)) => encode_command(&args),
        Some(CritCommand::Info { file, keys }) => print_info(&file, true, &keys, defaults),
        Some(CritCommand::X { dir, what, keys }) => {
            explore_command(&dir, what, false, &keys, defaults)
        }
        Some(CritCommand::Show(args)) => show(&args, defaults),
    };
    read(result).unwrap_or_else(|error| {
        eprintln!("crit: {error}");
        ExitCode::FAILURE
    })
}

/// How it went, seen by whoever reads the output.
fn read(result: Result<()>) -> Result<ExitCode> {
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // It has seen enough.
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error),
    }
}

fn explore_command(
    dir: &Path,
    what: What,
    as_json: bool,
    keys: &Keys,
    defaults: &Identities,
) -> Result<()> {
    let dir = sealed::open_dir(dir, &keys.identities(defaults)?)?;
    match as_json {
        true => write_text(None, &to_string(&explored(&dir, what)?, false)),
        false => explore(&dir, what, &mut io::stdout()),
    }
}

fn show(args: &Show, defaults: &Identities) -> Result<()> {
    let view = View { pretty: true, sizes_only: args.nopl };
    let identities = args.keys.identities(defaults)?;
    let json = if args.path.is_dir() {
        let dir = sealed::open_dir(&args.path, &identities)?;
        each_image(&dir, |kind, reader| entries(kind, reader, view))?
    } else {
        decode_file(&args.path, view, &identities)?
    };
    write_text(None, &to_string(&json, true))
}

/// What `of` gives for every image of a checkpoint, by its name; of those that are no messages
/// only the size.
fn each_image(dir: &ImageDir, of: impl Fn(Kind, &mut Reader) -> Result<Json>) -> Result<Json> {
    let mut images = Map::new();
    for name in dir.names()? {
        let Some((kind, id)) = Kind::of_file(&name) else { continue };
        let image = if kind.layout == kind::Layout::Raw {
            let file = dir.path().join(&name);
            let len = dir.open_file(&name)?.metadata();
            json!({ "bytes": len.map_err(|source| Error::Io { file, source })?.len() })
        } else {
            let Some(mut reader) = dir.reader(kind, id)? else { continue };
            of(kind, &mut reader)?
        };
        images.insert(name, image);
    }
    Ok(Json::Object(images))
}

fn print_info(file: &Path, pretty: bool, keys: &Keys, defaults: &Identities) -> Result<()> {
    let identities = keys.identities(defaults)?;
    let json = match file.is_dir() {
        true => each_image(&sealed::open_dir(file, &identities)?, summary)?,
        false => info(file, &identities)?,
    };
    write_text(None, &to_string(&json, pretty))
}

fn decode_command(args: &Decode, defaults: &Identities) -> Result<()> {
    let view = View { pretty: args.pretty, sizes_only: false };
    let json = match &args.input {
        Some(path) => decode_file(path, view, &args.keys.identities(defaults)?)?,
        None => {
            let bytes = read_input(None)?;
            let len = bytes.len() as u64;
            decode(Path::new(STDIN), Box::new(Cursor::new(bytes)), len, view)?
        }
    };
    write_text(args.output.as_deref(), &to_string(&json, args.pretty))
}

fn encode_command(args: &Encode) -> Result<()> {
    let text = read_input(args.input.as_deref())?;
    let json = serde_json::from_slice(&text).map_err(|source| {
        let file = args.input.clone().unwrap_or_else(|| STDIN.into());
        Error::Syntax { file, source }
    })?;
    write_output(args.output.as_deref(), &encode(&json)?)
}

/// What standard input is called in errors.
const STDIN: &str = "standard input";

fn read_input(path: Option<&Path>) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    let result = match path {
        Some(path) => File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)),
        None => io::stdin().read_to_end(&mut bytes),
    };
    match result {
        Ok(_) => Ok(bytes),
        Err(source) => Err(Error::Io { file: path.unwrap_or(Path::new(STDIN)).to_owned(), source }),
    }
}

/// Writes text, and ends its line if it goes to standard output.
fn write_text(path: Option<&Path>, text: &str) -> Result<()> {
    match path {
        Some(_) => write_output(path, text.as_bytes()),
        None => write_output(path, format!("{text}\n").as_bytes()),
    }
}

fn write_output(path: Option<&Path>, bytes: &[u8]) -> Result<()> {
    let result = match path {
        Some(path) => std::fs::write(path, bytes),
        None => io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()),
    };
    result.map_err(|source| {
        let file = path.unwrap_or(Path::new("standard output")).to_owned();
        Error::Io { file, source }
    })
}
