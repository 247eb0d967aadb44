//! `torpor key`: makes keys, and tells what there is to know of some.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser;
use serde_json::{Value as Json, json};
use torpor_seal::keys::{AgeIdentity, Certificate, Identity, KeyError, Recipient, Trust};
use torpor_seal::sign::scheme_of;
use torpor_worker::tell;
use zeroize::Zeroizing;

use crate::failure::Failure;

/// How `torpor key generate` is used.
const EXAMPLES: &str = "Examples:
  torpor key generate checkpoints.key
  torpor dump --tree 1234 --images-dir checkpoint --recipient age1...
  torpor restore --images-dir checkpoint --identity checkpoints.key";

/// The subcommands of `torpor key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a secret key to open sealed images with, and print its recipient
    ///
    /// The file is one of age: an X25519 key, for the owner of the file only. Seal images
    /// with --recipient and what is printed, and open them with --identity FILE.
    #[command(after_help = EXAMPLES)]
    Generate {
        /// The file to write; one that is there already is left alone
        file: PathBuf,
        /// Print a JSON object: the recipient
        #[arg(long)]
        json: bool,
    },
    /// Tell whose keys and certificates these are, and whether they can be used
    Inspect {
        /// Files of keys or certificates, age1..., provider:/PROGRAM or provider:/PROGRAM:KEY
        #[arg(required = true, value_name = "KEY", value_parser = NonEmptyStringValueParser::new())]
        keys: Vec<String>,
        /// Believe only certificates from the authorities in FILE
        #[arg(long, value_name = "FILE")]
        trust: Vec<PathBuf>,
        /// Refuse certificates that FILE lists as revoked
        #[arg(long, value_name = "FILE")]
        crl: Vec<PathBuf>,
        /// Print a JSON array: each key, what it is, and whether it can be used
        #[arg(long)]
        json: bool,
    },
}

/// Runs `torpor key`.
///
/// # Errors
/// If a key or certificate cannot be read, made or written.
pub fn run(command: KeyCommand) -> Result<ExitCode, Failure> {
    // A user who is not root may seldom lock as much memory as this program has.
    if let Err(error) = torpor_sys::secrecy::protect() {
        tell!(
            "torpor key: this process cannot be kept out of swap: {error} (ulimit -l says how much \
             memory may be locked)"
        );
    }
    match command {
        KeyCommand::Generate { file, json } => generate(&file, json)?,
        KeyCommand::Inspect { keys, trust, crl, json } => {
            inspect(&keys, &Trust::load(&trust, &crl)?, json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn generate(path: &Path, json: bool) -> Result<(), Failure> {
    let (identity, secret) = AgeIdentity::generate()?;
    let recipient = identity.recipient();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let text = Zeroizing::new(format!(
        "# created: {now} (seconds since 1970)\n# public key: {recipient}\n{}\n",
        *secret
    ));
    // What helps with tasks does not help with files.
    let failed =
        |e| Failure { hint: None, ..Failure::io(format_args!("key file {}", path.display()), &e) };
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    if let Err(error) = file.write_all(text.as_bytes()).and_then(|()| file.sync_all()) {
        // Half a key would only be in the way of a whole one.
        let _ = std::fs::remove_file(path);
        return Err(failed(error));
    }
    match json {
        true => println!("{}", json!({ "recipient": recipient.to_string() })),
        false => println!("{recipient}"),
    }
    Ok(())
}

fn inspect(keys: &[String], trust: &Trust, json: bool) -> Result<(), Failure> {
    let mut refused = Vec::new();
    let mut rows = Vec::new();
    for key in keys {
        let (lines, usable) = described(key, trust)?;
        if !json {
            println!("{key}:");
            lines.iter().for_each(|line| println!("  {line}"));
        }
        rows.push(json!({ "key": key, "what": lines, "usable": usable }));
        if !usable {
            refused.push(key.as_str());
        }
    }
    if json && refused.is_empty() {
        println!("{}", Json::Array(rows));
    }
    if !refused.is_empty() {
        Err(Failure::new(libc::EKEYREJECTED, format!("not to be used: {}", refused.join(", "))))
    } else {
        Ok(())
    }
}

/// What there is to say of a key, and whether it can be used.
fn described(key: &str, trust: &Trust) -> Result<(Vec<String>, bool), Failure> {
    let unknown = match Identity::load(key) {
        Ok(identities) => {
            let lines = identities.iter().map(|id| format!("opens {} {}", id.kind(), id.name()));
            // Those of P-256, for one, do both.
            return Ok((lines.chain(signs(key)).collect(), true));
        }
        Err(error) => error,
    };
    if let Some(signs) = signs(key) {
        return Ok((vec![signs], true));
    }
    match Recipient::parse(key) {
        Ok(recipients) => {
            let mut all = (Vec::new(), true);
            for recipient in recipients {
                all.0.push(format!("sealed for as {} {}", recipient.kind(), recipient.name()));
                if let Some(certificate) = recipient.certificate() {
                    all.0.extend(certificate_lines(certificate));
                }
                all.1 &= verdict(recipient.check(trust), &mut all.0);
            }
            return Ok(all);
        }
        // No file is meant.
        Err(error) if key.starts_with("age1") && !Path::new(key).exists() => {
            return Err(error.into());
        }
        Err(_) => {}
    }
    match Certificate::load(Path::new(key)) {
        Ok(certificate) => {
            let mut lines = certificate_lines(&certificate);
            let usable = verdict(certificate.check(trust), &mut lines);
            Ok((lines, usable))
        }
        Err(_) => Err(unknown.into()),
    }
}

/// That the private key in a file signs, if it does. A pipe can be read once, and was.
fn signs(key: &str) -> Option<String> {
    let path = Path::new(key);
    if !path.is_file() {
        return None;
    }
    let scheme = scheme_of(path).ok()??;
    Some(format!("signs {scheme}"))
}

fn certificate_lines(certificate: &Certificate) -> Vec<String> {
    vec![
        format!("certificate of {}", certificate.subject()),
        format!("valid from {} until {}", certificate.not_before(), certificate.not_after()),
    ]
}

fn verdict(checked: Result<(), KeyError>, lines: &mut Vec<String>) -> bool {
    let refused = checked.err();
    lines.extend(refused.iter().map(|error| format!("refused: {error}")));
    refused.is_none()
}
