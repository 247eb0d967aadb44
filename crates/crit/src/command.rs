//! The command lines: `crit …` and `torpor image …`.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use serde_json::{Map, Value as Json, json};
use torpor_images::{ImageDir, Kind, kind};

use crate::error::{Error, Result};
use crate::explore::{What, explore};
use crate::image::{View, decode, decode_file, encode, info};
use crate::text::to_string;

/// The subcommands of `torpor image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Show an image, or all images of a checkpoint, as JSON for people
    Show(Show),
    /// Say what kind of image it is and how many entries it has
    Info {
        /// The image
        file: PathBuf,
    },
    /// Turn an image into JSON
    Decode(Decode),
    /// Turn JSON into an image
    Encode(Encode),
    /// Show the process tree of a checkpoint
    Ps {
        /// The directory of the images
        dir: PathBuf,
    },
    /// Show the descriptors of each process of a checkpoint
    Fds {
        /// The directory of the images
        dir: PathBuf,
    },
    /// Show the memory areas of each process of a checkpoint
    Mems {
        /// The directory of the images
        dir: PathBuf,
    },
    /// Show which pages of each process are in the images
    Rss {
        /// The directory of the images
        dir: PathBuf,
    },
}

/// The arguments of `show`.
#[derive(Args, Debug)]
pub struct Show {
    /// The image, or the directory of a checkpoint
    path: PathBuf,
    /// Do not show the data behind entries, only its size
    #[arg(long)]
    nopl: bool,
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
    },
    /// Explore an image directory
    X {
        /// The directory of the images
        dir: PathBuf,
        /// What to show
        what: What,
    },
    /// Convert an image from binary to human-readable JSON
    Show(Show),
}

/// Runs `torpor image`.
#[must_use]
pub fn run(command: ImageCommand) -> ExitCode {
    let result = match command {
        ImageCommand::Show(args) => show(&args),
        ImageCommand::Info { file } => print_info(&file),
        ImageCommand::Decode(args) => decode_command(&args),
        ImageCommand::Encode(args) => encode_command(&args),
        ImageCommand::Ps { dir } => explore(&dir, What::Ps, &mut io::stdout()),
        ImageCommand::Fds { dir } => explore(&dir, What::Fds, &mut io::stdout()),
        ImageCommand::Mems { dir } => explore(&dir, What::Mems, &mut io::stdout()),
        ImageCommand::Rss { dir } => explore(&dir, What::Rss, &mut io::stdout()),
    };
    report("torpor image", result)
}

/// Runs `crit` with its own command line, whose first word is the program's
/// name.
#[must_use]
pub fn crit(args: impl IntoIterator<Item = OsString>) -> ExitCode {
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
        Some(CritCommand::Decode(args)) => decode_command(&args),
        Some(CritCommand::Encode(args)) => encode_command(&args),
        Some(CritCommand::Info { file }) => print_info(&file),
        Some(CritCommand::X { dir, what }) => explore(&dir, what, &mut io::stdout()),
        Some(CritCommand::Show(args)) => show(&args),
    };
    report("crit", result)
}

fn report(program: &str, result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Who reads the output has seen enough.
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn show(args: &Show) -> Result<()> {
    let view = View { pretty: true, sizes_only: args.nopl };
    let json = if args.path.is_dir() {
        show_dir(&args.path, view)?
    } else {
        decode_file(&args.path, view)?
    };
    write_text(None, &to_string(&json, true))
}

/// Every image of a checkpoint by its name; of those that are no messages
/// only the size.
fn show_dir(path: &Path, view: View) -> Result<Json> {
    let dir = ImageDir::open(path)?;
    let mut images = Map::new();
    for name in dir.names()? {
        let Some((kind, _)) = Kind::of_file(&name) else { continue };
        let image = if kind.layout == kind::Layout::Raw {
            let len = dir.open_file(&name)?.metadata();
            let len = len.map_err(|source| Error::Io { file: path.join(&name), source })?.len();
            json!({ "bytes": len })
        } else {
            decode_file(&path.join(&name), view)?
        };
        images.insert(name, image);
    }
    Ok(Json::Object(images))
}

fn print_info(file: &Path) -> Result<()> {
    write_text(None, &to_string(&info(file)?, true))
}

fn decode_command(args: &Decode) -> Result<()> {
    let view = View { pretty: args.pretty, sizes_only: false };
    let json = match &args.input {
        Some(path) => decode_file(path, view)?,
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
