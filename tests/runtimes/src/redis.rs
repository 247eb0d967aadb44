//! A small Redis client.

use std::fmt::Debug;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A simple string, or a bulk string.
    Text(String),
    /// A number.
    Number(i64),
    /// No such value.
    Nil,
    /// Several replies.
    List(Vec<Self>),
}

impl From<&str> for Reply {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// Both ways of reaching a server.
pub trait Stream: Read + Write + Debug + Send {}
impl<T: Read + Write + Debug + Send> Stream for T {}

/// One connection to a server.
#[derive(Debug)]
pub struct Redis {
    stream: BufReader<Box<dyn Stream>>,
}

impl Redis {
    /// Connects to `address`, which is `host:port` or the path of a Unix socket.
    pub fn connect(address: &str) -> io::Result<Self> {
        let stream: Box<dyn Stream> = if address.starts_with('/') {
            Box::new(UnixStream::connect(Path::new(address))?)
        } else {
            Box::new(TcpStream::connect(address)?)
        };
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends a command and waits for its answer; an error that the server reports is an error here.
    pub fn command(&mut self, words: &[&str]) -> io::Result<Reply> {
        self.send(words)?;
        self.receive()
    }

    /// Sends a command, whose answer may take its time.
    pub fn send(&mut self, words: &[&str]) -> io::Result<()> {
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.stream.get_mut().write_all(request.as_bytes())
    }

    /// A command whose answer is a number.
    #[track_caller]
    pub fn number(&mut self, words: &[&str]) -> i64 {
        match self.command(words) {
            Ok(Reply::Number(number)) => number,
            other => panic!("{words:?}: {other:?}"),
        }
    }

    /// A command whose answer is a string.
    #[track_caller]
    pub fn text(&mut self, words: &[&str]) -> String {
        match self.command(words) {
            Ok(Reply::Text(text)) => text,
            other => panic!("{words:?}: {other:?}"),
        }
    }

    /// A command whose answer is a list.
    #[track_caller]
    pub fn list(&mut self, words: &[&str]) -> Vec<Reply> {
        match self.command(words) {
            Ok(Reply::List(list)) => list,
            other => panic!("{words:?}: {other:?}"),
        }
    }

    /// Waits for the next answer.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let line = self.line()?;
        let (kind, rest) = line.split_at_checked(1).ok_or_else(|| bad(&line))?;
        let number = || rest.parse::<i64>().map_err(|_| bad(&line));
        match kind {
            "+" => Ok(Reply::Text(rest.to_owned())),
            ":" => Ok(Reply::Number(number()?)),
            "$" => match usize::try_from(number()?) {
                Err(_) => Ok(Reply::Nil),
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.stream.read_exact(&mut bytes)?;
                    bytes.truncate(length);
                    String::from_utf8(bytes).map(Reply::Text).map_err(|_| bad("not text"))
                }
            },
            "*" => match usize::try_from(number()?) {
                Err(_) => Ok(Reply::Nil),
                Ok(length) => {
                    (0..length).map(|_| self.receive()).collect::<io::Result<_>>().map(Reply::List)
                }
            },
            _ => Err(bad(&line)),
        }
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}
