//! The lines of rules.

/// Reads each line of rules with `line`, which writes behind the text what it has read.
pub(super) fn lines<'r>(
    rules: &'r str,
    mut line: impl FnMut(&'r str, &mut String) -> Result<(), String>,
) -> Result<String, String> {
    let mut out = String::with_capacity(rules.len());
    for (number, text) in rules.lines().enumerate() {
        line(text, &mut out).map_err(|what| format!("line {}: {what}", number + 1))?;
        out.push('\n');
    }
    Ok(out)
}
