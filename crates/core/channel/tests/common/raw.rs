// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that speaks the control protocol by hand, so that it can send what no honest endpoint sends.

use tombolo_domain::{Deadline, Endpoint, Error, Listener as DomainListener, Offer, wait_readable};
use tombolo_layout::{
    Features, SegmentHeader, VERSION,
    handshake::{Greeting, Message},
    header::LEN,
    state::State,
    words,
};
use tombolo_mem::{OwnControl, OwnWord};

use super::SOON;

pub const EPOCH: u64 = 0x5eed_5eed_5eed_5eed;

/// Returns the greeting of an honest endpoint.
pub fn greeting() -> Greeting {
    Greeting {
        version_min: VERSION,
        version_max: VERSION,
        offered: Features::HANDOVER,
        required: Features::NONE,
        epoch: EPOCH,
        map_limit: 1 << 31,
    }
}

/// Returns the greeting of an honest endpoint that reads on where its peer went ahead (H-9).
pub fn ahead() -> Greeting {
    Greeting { offered: Features::HANDOVER.or(Features::AHEAD), ..greeting() }
}

/// Returns the header that an honest endpoint would write into a small segment.
pub fn header(generation: u16) -> SegmentHeader {
    SegmentHeader::new(4096, generation, 0, Features::HANDOVER, EPOCH)
}

/// A segment of `len` bytes that begins with `bytes`, open in both directions.
pub fn segment(link: &mut dyn Endpoint, len: usize, bytes: &[u8; LEN]) -> (OwnControl, Offer) {
    let (segment, offer) = link.allocate(len).unwrap();
    let (control, _) = segment.split(4096);
    control.write_header(bytes);
    for state in [words::WRITER_STATE, words::READER_STATE] {
        control.word(state).store_release(State::OPEN.encode());
    }
    (control, offer)
}

/// Sends `message` with an honest small segment of `generation`, which is returned.
pub fn send_with_segment(link: &mut dyn Endpoint, message: &[u8], generation: u16) -> (OwnControl, Offer) {
    let header = header(generation);
    let (segment, offer) = segment(link, header.segment_len as usize, &header.encode());
    link.send(message, Some(&offer)).unwrap();
    (segment, offer)
}

/// Returns the peer's next message.
pub fn receive_message(link: &mut dyn Endpoint) -> Result<Message, Error> {
    loop {
        if let Some(received) = link.recv(1 << 31)? {
            return Ok(Message::decode(&received.message).unwrap());
        }
        assert!(wait_readable(link.fd(), Deadline::after(SOON)).unwrap(), "the peer says nothing");
    }
}

/// Returns the connection of the next caller.
pub fn open(listener: &mut dyn DomainListener) -> Box<dyn Endpoint> {
    loop {
        if let Some(link) = listener.accept().unwrap() {
            return link;
        }
        assert!(wait_readable(listener.fd(), Deadline::after(SOON)).unwrap(), "nobody connects");
    }
}
