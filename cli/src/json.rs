// SPDX-License-Identifier: MIT OR Apache-2.0
//! What commands print for other programs: JSON, beside the text or in its place.

use std::{fmt, path::PathBuf};

use clap::Args;

/// The option `--json`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Output")]
pub struct JsonOption {
    /// Write the results as JSON: to FILE, beside the text; without FILE to standard output, in place of the text.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

impl JsonOption {
    fn replaces_text(&self) -> bool {
        self.json.as_ref().is_some_and(|file| file.as_os_str() == "-")
    }

    /// Whether the value is written anywhere.
    pub fn is_asked(&self) -> bool {
        self.json.is_some()
    }

    /// Where the text of the command goes.
    pub fn text(&self) -> Text {
        Text { silent: self.replaces_text() }
    }

    /// Writes the value, if the option asks for it.
    pub fn write(&self, value: impl FnOnce() -> Json) -> Result<(), String> {
        let Some(file) = &self.json else { return Ok(()) };
        if self.replaces_text() {
            return Text { silent: false }.line(value());
        }
        std::fs::write(file, format!("{}\n", value())).map_err(|e| format!("{}: {e}", file.display()))
    }
}

/// Standard output, or nothing where JSON takes its place.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    silent: bool,
}

impl Text {
    pub fn line(self, line: impl fmt::Display) -> Result<(), String> {
        use std::io::{ErrorKind, Write as _};
        match if self.silent { Ok(()) } else { writeln!(std::io::stdout(), "{line}") } {
            // A reader such as `head` may close the pipe when it has enough.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("standard output: {error}")),
            _ => Ok(()),
        }
    }
}

/// A value of JSON. A number that is not finite is `null`, since JSON has no other word for it.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Bool(bool),
    /// Up to `u128`, digit by digit.
    Integer(u128),
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(&'static str, Json)>),
}

impl Json {
    pub fn list(values: impl IntoIterator<Item = Json>) -> Self {
        Self::List(values.into_iter().collect())
    }

    /// A number that is an index or a count.
    pub fn count(n: usize) -> Self {
        Self::Integer(n as u128)
    }

    pub fn text(text: impl fmt::Display) -> Self {
        Self::Text(text.to_string())
    }
}

fn quoted(out: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    use fmt::Write as _;
    out.write_char('"')?;
    for c in text.chars() {
        match c {
            '"' | '\\' => write!(out, "\\{c}")?,
            '\n' => out.write_str("\\n")?,
            c if (c as u32) < 0x20 => write!(out, "\\u{:04x}", c as u32)?,
            c => out.write_char(c)?,
        }
    }
    out.write_char('"')
}

impl fmt::Display for Json {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => write!(out, "{value}"),
            Self::Integer(value) => write!(out, "{value}"),
            Self::Number(value) if value.is_finite() => write!(out, "{value:e}"),
            Self::Number(_) => out.write_str("null"),
            Self::Text(text) => quoted(out, text),
            Self::List(values) => {
                out.write_str("[")?;
                for (i, value) in values.iter().enumerate() {
                    write!(out, "{}{value}", if i > 0 { ", " } else { "" })?;
                }
                out.write_str("]")
            }
            Self::Object(fields) => {
                out.write_str("{")?;
                for (i, (name, value)) in fields.iter().enumerate() {
                    out.write_str(if i > 0 { ", " } else { "" })?;
                    quoted(out, name)?;
                    write!(out, ": {value}")?;
                }
                out.write_str("}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_as_text() {
        let value = Json::Object(vec![
            ("a", Json::list([Json::count(3), Json::Bool(true), Json::Number(0.5), Json::Number(f64::NAN)])),
            ("b\"", Json::text("× \"quoted\" \\ and\na line\u{1}")),
            ("c", Json::Object(vec![])),
            ("d", Json::Integer(u128::MAX)),
        ]);
        assert_eq!(
            value.to_string(),
            "{\"a\": [3, true, 5e-1, null], \"b\\\"\": \"× \\\"quoted\\\" \\\\ and\\na line\\u0001\", \"c\": {}, \
             \"d\": 340282366920938463463374607431768211455}"
        );
    }
}
