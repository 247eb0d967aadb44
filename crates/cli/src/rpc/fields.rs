//! Finds fields in a request that this version does not know.
//!
//! Decoding drops them, but an option that is dropped is an option that is ignored:
//! the client asked for something that would not happen.

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use crate::failure::Failure;

/// The last field of `criu_req`.
const LAST_OF_REQUEST: u32 = 6;
/// `criu_req.opts`.
const OPTS: u32 = 2;
/// The last field of `criu_opts`, and the one that is not used.
const LAST_OF_OPTS: u32 = 71;
const UNUSED_OF_OPTS: u32 = 40;
/// `criu_opts.torpor_option`: Torpor's own are far from those that CRIU may still add.
const TORPOR_OPTION: u32 = 10001;

/// Refuses an encoded request that has fields which are not known.
///
/// # Errors
/// If it has, or if it is malformed.
pub(super) fn check(request: &[u8]) -> Result<(), Failure> {
    each_field(request, |tag, value| {
        if tag > LAST_OF_REQUEST {
            return Err(Failure::unsupported(format!("field {tag} of criu_req is not known")));
        }
        match (tag, value) {
            (OPTS, Some(opts)) => each_field(opts, |tag, _| {
                let known = tag <= LAST_OF_OPTS && tag != UNUSED_OF_OPTS || tag == TORPOR_OPTION;
                if !known {
                    let text = format!("field {tag} of criu_opts is not known");
                    return Err(Failure::unsupported(text));
                }
                Ok(())
            }),
            _ => Ok(()),
        }
    })
}

/// Calls `found` with the number of each field of a message, and its bytes if it is
/// of a kind that has a length.
fn each_field(
    mut message: &[u8],
    mut found: impl FnMut(u32, Option<&[u8]>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let malformed = |_| Failure::new(libc::EBADMSG, "malformed request");
    while !message.is_empty() {
        let (tag, kind) = decode_key(&mut message).map_err(malformed)?;
        if kind != WireType::LengthDelimited {
            skip_field(kind, tag, &mut message, DecodeContext::default()).map_err(malformed)?;
            found(tag, None)?;
            continue;
        }
        let len = decode_varint(&mut message).map_err(malformed)?;
        let value = usize::try_from(len).ok().and_then(|len| message.split_at_checked(len));
        let (value, rest) =
            value.ok_or_else(|| Failure::new(libc::EBADMSG, "malformed request: truncated"))?;
        found(tag, Some(value))?;
        message = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_fields_pass() {
        assert!(check(&[]).is_ok());
        assert!(check(&[8, 1, 18, 2, 8, 5]).is_ok());
    }

    #[test]
    fn unknown_fields_are_named() {
        assert_eq!(check(&[8, 1, 56, 1]).unwrap_err().text, "field 7 of criu_req is not known");
        let opts = check(&[8, 1, 18, 3, 0xc0, 0x04, 1]).unwrap_err();
        assert_eq!(opts.text, "field 72 of criu_opts is not known");
        let opts = check(&[8, 1, 18, 4, 0x90, 0xf1, 0x04, 1]).unwrap_err();
        assert_eq!(opts.text, "field 10002 of criu_opts is not known");
        assert_eq!(check(&[8, 1, 18, 5, 0x8a, 0xf1, 0x04, 1, b'x']), Ok(()));
    }

    #[test]
    fn malformed_messages_end() {
        for bytes in [&[18, 200][..], &[18], &[18, 0xff, 0xff, 0xff, 0xff, 0xff], &[255; 11], &[7]]
        {
            assert_eq!(check(bytes).unwrap_err().errno, libc::EBADMSG, "{bytes:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_come_to_an_end(bytes: Vec<u8>) {
            // Whatever decodes here and has only known fields decodes as a request or not.
            if check(&bytes).is_ok() {
                let _ = <torpor_images::proto::CriuReq as prost::Message>::decode(bytes.as_slice());
            }
        }

        #[test]
        fn known_requests_pass(kind in 0..14, pid: i32, root: String, level: i32) {
            let opts = torpor_images::proto::CriuOpts {
                pid: Some(pid),
                root: Some(root),
                log_level: Some(level),
                ..Default::default()
            };
            let request = torpor_images::proto::CriuReq {
                r#type: kind,
                opts: Some(opts),
                ..Default::default()
            };
            let packet = prost::Message::encode_to_vec(&request);
            proptest::prop_assert_eq!(check(&packet), Ok(()));
        }
    }
}
