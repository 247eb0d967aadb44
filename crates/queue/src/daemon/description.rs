//! The description of the interface for clients (`openapi.json`), and what it says of a path.

use serde_json::Value;

/// The description.
pub(super) const OPENAPI: &str = include_str!("openapi.json");

/// The methods by which something can be asked for, separated by commas; none where there is nothing of that name.
#[must_use]
pub(super) fn methods(path: &str) -> String {
    let description: Value = serde_json::from_str(OPENAPI).unwrap_or_default();
    let mut paths = description["paths"].as_object().into_iter().flatten();
    let found = paths.find(|(template, _)| fits(template, path));
    let methods = found.and_then(|(_, methods)| methods.as_object()).into_iter().flatten();
    let mut methods: Vec<String> = methods.map(|(method, _)| method.to_uppercase()).collect();
    methods.sort();
    methods.join(", ")
}

/// Whether a path is one of those that a template with words in braces describes.
fn fits(template: &str, path: &str) -> bool {
    let [template, path] = [template, path].map(parts);
    let is_it = |(word, part): (&&str, &&str)| word.starts_with('{') || word == part;
    template.len() == path.len() && template.iter().zip(&path).all(is_it)
}

/// The parts of a path.
#[must_use]
pub(super) fn parts(path: &str) -> Vec<&str> {
    path.split('/').filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_the_methods_that_are_described() {
        for (path, wanted) in [
            ("/", "GET"),
            ("/v1/jobs", "GET, POST"),
            ("/v1/jobs/7", "DELETE, GET"),
            ("/v1/jobs/7/stdin", "PUT"),
            ("/v1/quotas/owner:ann", "PUT"),
            ("/v1/jobs/7/nonsense", ""),
            ("/nonsense", ""),
        ] {
            assert_eq!(methods(path), wanted, "{path}");
        }
    }
}
