//! The page that browsers get.

use crate::http::Response;

const PAGE: &str = include_str!("page.html");

/// Where its script begins.
const SCRIPT: &str = "<script>";

/// The page. Names, commands and output that it shows are anybody's: a browser runs no script there but its own, which has a
/// word that nobody can guess, asks nobody but this daemon, and shows it in no other page.
#[must_use]
pub(super) fn page() -> Response {
    let Ok(word) = torpor_seal::secret::random() else {
        return Response::problem(500, "the kernel gives no random numbers");
    };
    let nonce = format!("{:032x}", u128::from_le_bytes(word));
    let page = PAGE.replacen(SCRIPT, &format!("<script nonce=\"{nonce}\">"), 1);
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    Response { policy: Some(policy), ..Response::text("text/html; charset=utf-8", page) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::Body;

    #[test]
    fn the_page_has_one_script_by_a_word_that_is_new_each_time() {
        assert_eq!(PAGE.matches("<script").count(), 1);
        let nonces = [(); 2].map(|()| {
            let Response { policy: Some(policy), body: Body::Whole(page), .. } = page() else {
                panic!("no page")
            };
            let (_, rest) = policy.split_once("script-src 'nonce-").unwrap();
            let nonce = rest.split_once('\'').unwrap().0.to_owned();
            let page = String::from_utf8(page).unwrap();
            assert!(page.contains(&format!("<script nonce=\"{nonce}\">")), "{policy}");
            nonce
        });
        assert!(nonces[0].len() == 32 && nonces[0] != nonces[1], "{nonces:?}");
    }
}
