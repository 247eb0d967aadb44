//! An engine that does nothing: `criu`, for whom has a container dumped that is stopped and dumped already.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use prost::Message;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use torpor_images::proto::{CriuReq, CriuReqType, CriuResp, CriuVersion};
use torpor_worker::tell;

use crate::error::{Context, Error, Result};

/// No request is longer.
const MAX_REQUEST: usize = 4 << 20;

/// Answers what a runtime asks of `criu swrk NUMBER`.
#[must_use]
pub fn serve(words: &[String]) -> ExitCode {
    match try_serve(words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_serve(words: &[String]) -> Result<()> {
    let number = match words {
        [action, number] if action == "swrk" => number.parse().ok(),
        _ => None,
    };
    let number = number.ok_or_else(|| Error::refused(format!("{words:?} is not to be done")))?;
    let failed = || format!("swrk {number}");
    let socket: OwnedFd = torpor_sys::inherited::duplicate(number).context(failed)?;
    let mut packet = vec![0; MAX_REQUEST];
    loop {
        let (_, len) = recv(&socket, &mut packet[..], RecvFlags::empty()).context(failed)?;
        if len == 0 {
            return Ok(());
        }
        let request = packet.get(..len).and_then(|packet| CriuReq::decode(packet).ok());
        let request = request.ok_or_else(|| Error::refused("this is no request"))?;
        let answer = answer(&request).encode_to_vec();
        let control = &mut SendAncillaryBuffer::default();
        let sent = sendmsg(&socket, &[IoSlice::new(&answer)], control, SendFlags::NOSIGNAL);
        sent.context(failed)?;
        if !request.keep_open() {
            return Ok(());
        }
    }
}

/// All is well, and all that is asked for is there.
fn answer(request: &CriuReq) -> CriuResp {
    let is_dump = [CriuReqType::Version, CriuReqType::FeatureCheck, CriuReqType::Dump]
        .iter()
        .any(|&kind| request.r#type == kind as i32);
    let version = CriuVersion { major_number: 4, minor_number: 2, ..Default::default() };
    CriuResp {
        r#type: request.r#type,
        success: is_dump,
        version: (request.r#type == CriuReqType::Version as i32).then_some(version),
        features: request.features,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_succeeds_and_a_restore_does_not() {
        let of = |kind: CriuReqType| {
            let mut request = CriuReq::default();
            request.set_type(kind);
            answer(&request)
        };
        assert!(of(CriuReqType::Version).version.is_some_and(|it| it.major_number == 4));
        assert!(of(CriuReqType::Dump).success && !of(CriuReqType::Restore).success);
    }
}
