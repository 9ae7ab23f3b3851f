// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A pipe over real memory, single-threaded: what goes in comes out.
#![cfg(not(loom))]

mod common;

use common::{Pair, pair};
use std::io::IoSlice;
use tombolo_ring::Error;

#[test]
fn r5_stream_comes_out_as_it_went_in_across_the_wrap() {
    let Pair { mut writer, mut reader, .. } = pair(4096, false);
    let (mut next, mut expected) = (0u8, 0u8);
    for round in 0..5000usize {
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            next = next.wrapping_add(1);
            next
        })
        .take(round % 613)
        .collect();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            if let Some(n) = writer.write(rest).unwrap() {
                rest = &rest[n..];
            }
            let mut out = [0; 100];
            if let Some(n) = reader.read(&mut out).unwrap() {
                for byte in &out[..n] {
                    expected = expected.wrapping_add(1);
                    assert_eq!(*byte, expected);
                }
            }
        }
    }
}

#[test]
fn r22_records_come_out_whole_and_apart() {
    let Pair { mut writer, mut reader, .. } = pair(4096, true);
    let mut out = vec![0; 4096];
    for len in (0..4089usize).step_by(7).chain([4088]) {
        let record: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
        let (a, b) = record.split_at(len / 3);
        assert_eq!(writer.send_vectored(&[IoSlice::new(a), IoSlice::new(b)]), Ok(Some(())));
        assert_eq!(reader.recv(&mut out), Ok(Some(len)));
        assert_eq!(out[..len], record);
    }
    assert_eq!(reader.recv(&mut out), Ok(None));
}

#[test]
fn what_is_done_at_once_is_done_whole_or_left_to_the_long_way() {
    let Pair { mut writer, mut reader, .. } = pair(4096, false);
    let mut out = [0; 4096];
    assert_eq!(reader.read_at_once(&mut out[..4], false), 0, "nothing is there");
    assert!(!writer.write_at_once(b"?"), "the reader was not seen yet");
    assert_eq!(writer.write(b"seven"), Ok(Some(5)));
    assert!(writer.write_at_once(b" b"));
    assert_eq!(reader.read_at_once(&mut out[..8], true), 0, "one byte too few");
    assert_eq!(reader.read_at_once(&mut out[..8], false), 7);
    assert_eq!(out[..7], *b"seven b");
    assert!(writer.write_at_once(&[1; 4000]) && !writer.write_at_once(&[2; 90]), "89 bytes are free");
    assert_eq!(reader.read_at_once(&mut out[..4000], true), 0, "more than a step is no short work");
    assert_eq!(reader.read(&mut out), Ok(Some(4000)));
    assert!(!writer.write_at_once(&[2; 90]), "the reader is not looked at");
    assert_eq!(writer.write(&[2; 90]), Ok(Some(90)));
    reader.close();
    assert!(!writer.write_at_once(&[3]), "nobody reads it");
    assert_eq!(writer.write(&[3]), Err(Error::Closed));
}

#[test]
fn record_that_is_sent_at_once_is_sent_whole_or_left_to_the_long_way() {
    let Pair { mut writer, mut reader, .. } = pair(4096, true);
    let mut out = vec![0; 4096];
    assert!(!writer.send_at_once(b"?"), "the reader was not seen yet");
    assert_eq!(writer.send(b"first"), Ok(Some(())));
    assert!(writer.send_at_once(b"second") && writer.send_at_once(b""));
    for record in [&b"first"[..], b"second", b""] {
        assert_eq!(reader.recv(&mut out), Ok(Some(record.len())));
        assert_eq!(out[..record.len()], *record);
    }
    assert_eq!((writer.counters().messages, writer.counters().bytes), (3, 40));
    // As far as the writer knows, 40 bytes are unread.
    assert!(!writer.send_at_once(&[1; 4049]), "one byte too many, with its header");
    assert!(writer.send_at_once(&[1; 4048]) && !writer.send_at_once(b""), "no room, and the reader is not looked at");
    assert_eq!(reader.recv(&mut out), Ok(Some(4048)));
    assert_eq!(writer.send(&[2; 90]), Ok(Some(())));
    reader.close();
    assert!(!writer.send_at_once(b"!"), "nobody receives it");
    assert_eq!(writer.send(b"!"), Err(Error::Closed));
}
