//! Access control lists (acl(5)) of files, with the ids of the archive that they stand in.

use super::field::Result;

/// The attributes that lists are, in the order of [`Entry::lists`](super::Entry::lists).
pub const LISTS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];

/// What an attribute starts with, and the size of a line (linux/posix_acl_xattr.h).
const VERSION: [u8; 4] = 2_u32.to_le_bytes();
const LINE: usize = 8;
/// What lines are about (linux/posix_acl.h): the owner, a user, the group, a group, the mask, others.
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
/// The id of a line that is about no user and no group by id.
const NO_ID: u32 = u32::MAX;

/// Who has which rights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessList(Vec<Line>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Line {
    tag: u16,
    rights: u16,
    id: u32,
}

impl AccessList {
    /// The list that an attribute holds.
    ///
    /// # Errors
    /// What is no list; a line about nobody.
    pub fn of_attribute(value: &[u8]) -> Result<Self> {
        let (lines, []) = value.strip_prefix(&VERSION).ok_or_else(wrong)?.as_chunks::<LINE>()
        else {
            return Err(wrong());
        };
        let line = |&[a, b, c, d, id @ ..]: &[u8; LINE]| Line {
            tag: u16::from_le_bytes([a, b]),
            rights: u16::from_le_bytes([c, d]),
            id: u32::from_le_bytes(id),
        };
        Self::of_lines(lines.iter().map(line).collect())
    }

    /// The list of a text with numeric ids.
    pub(super) fn of_text(text: &str) -> Result<Self> {
        let lines = text.split([',', '\n']).filter(|line| !line.trim().is_empty());
        Self::of_lines(lines.map(|line| of_words(line).ok_or_else(wrong)).collect::<Result<_>>()?)
    }

    fn of_lines(lines: Vec<Line>) -> Result<Self> {
        let known = |line: &Line| match line.tag {
            USER | GROUP => line.id != NO_ID,
            OWNER | OWNING_GROUP | MASK | OTHER => true,
            _ => false,
        };
        match lines.iter().all(|line| known(line) && line.rights <= 7) {
            true => Ok(Self(lines)),
            false => Err(wrong()),
        }
    }

    /// The attribute that holds the list, where users and groups have the ids that `uid` and `gid` return for those of
    /// the archive; `None` if one has none.
    #[must_use]
    pub fn attribute(
        &self,
        uid: impl Fn(u32) -> Option<u32>,
        gid: impl Fn(u32) -> Option<u32>,
    ) -> Option<Vec<u8>> {
        let mut value = VERSION.to_vec();
        for line in &self.0 {
            let id = match line.tag {
                USER => uid(line.id)?,
                GROUP => gid(line.id)?,
                _ => NO_ID,
            };
            value.extend(line.tag.to_le_bytes());
            value.extend(line.rights.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        Some(value)
    }
}

fn wrong() -> String {
    "an access control list that is none".to_owned()
}

/// A line of a text: `user:1000:rw-`. A comment on the mask may follow.
fn of_words(line: &str) -> Option<Line> {
    let line = line.split(['\t', '#']).next()?.trim();
    let mut words = line.split(':');
    let (kind, id, text) = (words.next()?, words.next()?, words.next()?);
    let (tag, id) = match (kind, id) {
        ("user" | "u", "") => (OWNER, NO_ID),
        ("user" | "u", id) => (USER, id.parse().ok()?),
        ("group" | "g", "") => (OWNING_GROUP, NO_ID),
        ("group" | "g", id) => (GROUP, id.parse().ok()?),
        ("mask" | "m", "") => (MASK, NO_ID),
        ("other" | "o", "") => (OTHER, NO_ID),
        _ => return None,
    };
    let mut rights = 0;
    for right in text.chars() {
        rights |= match right {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return None,
        };
    }
    words.next().is_none().then_some(Line { tag, rights, id })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn texts_and_attributes_say_the_same() {
        let text = "user::rwx,user:1000:r--,group::r-x,group:7:-w-,mask::r-x,other::---\n";
        let list = AccessList::of_text(text).unwrap();
        let value = list.attribute(Some, Some).unwrap();
        assert_eq!(value.len(), 4 + 6 * LINE);
        assert_eq!(value[12..20], [2, 0, 4, 0, 0xe8, 3, 0, 0]);
        assert_eq!(AccessList::of_attribute(&value).unwrap(), list);
        let commented = AccessList::of_text("user:1:rwx\t#effective:r--");
        assert_eq!(commented, AccessList::of_text("u:1:rwx"));
    }

    /// The ids of users and groups are others outside of a user namespace.
    #[test]
    fn ids_are_translated() {
        let of = |text| AccessList::of_text(text).unwrap();
        let outside = |id| (id < 10).then_some(id + 100);
        let value = of("u::rw-,u:1:rw-,g::r--,g:2:r--,m::rw-,o::r--").attribute(outside, Some);
        let expected = of("u::rw-,u:101:rw-,g::r--,g:2:r--,m::rw-,o::r--").attribute(Some, Some);
        assert_eq!(value, expected);
        assert_eq!(of("u:10:rw-").attribute(outside, Some), None);
    }

    #[test]
    fn what_is_no_list_is_an_error() {
        for text in ["user:name:rwx", "user", "user::rwz", "mask:1:r--", "user::r:x", "u:-1:r"] {
            assert_eq!(AccessList::of_text(text), Err(wrong()), "{text}");
        }
        let line = |tag: u8, rights: u8, id: u8| {
            [&VERSION[..], &[tag, 0, rights, 0, id, id, id, id]].concat()
        };
        AccessList::of_attribute(&line(2, 7, 1)).unwrap();
        let (cut, long) = (line(2, 7, 1)[..11].to_vec(), [line(2, 7, 1), vec![0]].concat());
        let other_version = [&[1, 0, 0, 0], &line(2, 7, 1)[4..]].concat();
        // An id that the namespace does not have.
        let strange = [line(2, 7, 255), line(8, 7, 255), line(2, 8, 1), line(3, 7, 1)];
        for value in strange.iter().chain([&cut, &long, &other_version, &vec![]]) {
            assert_eq!(AccessList::of_attribute(value), Err(wrong()), "{value:?}");
        }
    }
}
