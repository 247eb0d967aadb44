//! What sections on errors and other comments say.

use super::{crates, root, sources};

/// The text of each section on errors, in one line.
fn sections_on_errors(source: &str) -> Vec<String> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let behind = lines.split(|line| *line == "/// # Errors").skip(1);
    let text = |rest: &[&str]| {
        let section = rest.iter().map_while(|line| line.strip_prefix("/// "));
        section.collect::<Vec<_>>().join(" ")
    };
    behind.map(text).collect()
}

/// Whether a section begins with nothing but that it fails, whatever is behind that: "If it cannot be made; it is gone then."
fn says_that_it_fails(section: &str) -> bool {
    let begin = section.split([';', ':']).next().unwrap().trim_end_matches('.');
    let denies = |words: &[&str]| words.iter().any(|word| ["cannot", "not"].contains(word));
    let mut parts = begin.split(", ").map(|part| part.split(' ').collect::<Vec<_>>());
    let first = parts.next().unwrap();
    let of_it = matches!(first.as_slice(), ["If", "it" | "they" | "that" | "this" | "one", ..]);
    let adds_nothing =
        |part: Vec<&str>| part[0] == "or" && (part.len() < 3 || part.len() == 3 && denies(&part));
    of_it && first.len() <= 5 && denies(&first) && parts.all(adds_nothing)
}

/// Whether a section says what the error looks like, or whose it is, and not when there is one: "A sentence that names it."
fn says_what_it_is(section: &str) -> bool {
    const BEGINS: [&str; 6] =
        ["A sentence", "A message", "Which ", "Whatever", "The first one", "The first of them"];
    let words = section.split([' ', ';', ',', '.']).take(4);
    let words: Vec<&str> = words.collect();
    let of_others = matches!(words.as_slice(), ["What", "the", _, "says" | "said"]);
    of_others || BEGINS.iter().any(|begin| section.starts_with(begin))
}

#[test]
fn sections_that_say_little_are_known() {
    for little in [
        "If it cannot be made.",
        "If it cannot; the sentence says why.",
        "If that cannot be, or must not.",
        "If it cannot be restored: all is then as before.",
    ] {
        assert!(says_that_it_fails(little), "{little}");
    }
    for little in ["Whatever keeps it here.", "What the daemon said, or that there is none."] {
        assert!(says_what_it_is(little), "{little}");
    }
    for much in ["If it cannot be read, or is damaged.", "If the file cannot be read; a device."] {
        assert!(!says_that_it_fails(much) && !says_what_it_is(much), "{much}");
    }
}

/// A caller wants to know what can happen, and when. That the kernel may say no, or that images
/// may be wrong, is true of each of them.
#[test]
fn sections_on_errors_say_which() {
    const VAGUE: [&str; 10] = [
        "the kernel's",
        "the images'",
        "the image file's",
        "the image files'",
        "the file's",
        "the connection's",
        "the database's",
        "contradictions in the images",
        "if it cannot be restored",
        "whatever the engine meets",
    ];
    let sections = sections_on_errors(&sources(&root().join("crates")));
    assert!(sections.len() > 1000, "there are {} sections on errors", sections.len());
    let is_vague = |section: &&String| {
        let section = section.to_lowercase();
        let mut parts = section.split([';', '.', ',']);
        parts.any(|part| VAGUE.iter().any(|vague| part.ends_with(vague)))
    };
    // Or nothing but a number of the kernel's, or a word.
    let is_bare = |section: &&String| {
        let bare =
            ["gone.", "damaged images.", "a damaged image.", "why not.", "the one that was there."];
        let number = section.strip_prefix("`E").and_then(|rest| rest.strip_suffix("`."));
        bare.contains(&section.to_lowercase().as_str())
            || number.is_some_and(|rest| rest.bytes().all(|c| c.is_ascii_uppercase()))
    };
    let says_little = |s: &&String| {
        is_vague(s) || is_bare(s) || says_that_it_fails(s.as_str()) || says_what_it_is(s.as_str())
    };
    let vague: Vec<_> = sections.iter().filter(says_little).collect();
    assert!(vague.is_empty(), "sections on errors that say neither which nor when: {vague:#?}");
}

/// Whether a section is a manual page's name only: `See open(2).`
fn is_manual_page(section: &str) -> bool {
    let page = section.strip_prefix("See ").and_then(|rest| rest.strip_suffix(")."));
    let named = page.and_then(|page| page.split_once('('));
    named.is_some_and(|(name, chapter)| {
        !name.contains(' ') && chapter.bytes().all(|c| c.is_ascii_digit())
    })
}

/// A system call in Rust's clothes fails as its manual page says. All else says what can happen here.
#[test]
fn only_system_calls_leave_their_errors_to_manual_pages() {
    assert!(is_manual_page("See open(2)."));
    assert!(!is_manual_page("See [`Pages::load`]."));
    assert!(!is_manual_page("See open(2); if nobody is there."));
    let of = |krate: &str| sections_on_errors(&sources(&root().join("crates").join(krate)));
    let named = |krate: &str| of(krate).iter().filter(|text| is_manual_page(text)).count();
    assert!(named("sys") > 20, "system calls name {} pages", named("sys"));
    let others = crates().into_iter().filter(|krate| krate != "sys");
    let found: Vec<_> =
        others.map(|krate| (named(&krate), krate)).filter(|(n, _)| *n > 0).collect();
    assert!(found.is_empty(), "sections on errors that are a page's name only: {found:?}");
}

/// The words of all comments, in their order.
fn words_of_comments(source: &str) -> Vec<&str> {
    let comments = source.lines().filter_map(|line| Some(line.split_once("//")?.1));
    comments.flat_map(|comment| comment.trim_start_matches(['/', '!']).split_whitespace()).collect()
}

/// A reader learns first whom a sentence is about: a clause follows a noun, or begins with
/// "whoever". Questions may stand alone.
#[test]
fn clauses_in_comments_say_whom_they_are_about() {
    const BEFORE: [&str; 8] = ["for", "of", "by", "to", "from", "with", "than", "only"];
    let all = sources(&root().join("crates")) + &sources(&root().join("tests"));
    let words = words_of_comments(&all);
    assert!(words.len() > 100_000, "there are {} words in comments", words.len());
    let has_no_head = |four: &&[&str]| {
        let &[before, who, verb, no] = *four else { return false };
        // Nobody asks who does not do something.
        let is_denied = verb == "cannot" || ["no", "not"].contains(&no);
        let is_first = who == "Who" || (who == "who" && before.ends_with([':', ';']));
        (who == "who" && BEFORE.contains(&before)) || (is_first && is_denied)
    };
    let found = words.windows(4).filter(has_no_head);
    let found: Vec<String> = found.map(|four| four.join(" ")).collect();
    assert!(found.is_empty(), "clauses that do not say whom they are about: {found:#?}");
}
