// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The golden traces of `spec/vectors`: the words and bytes of every step, as they are in memory.
#![cfg(not(loom))]

mod common;

use std::os::fd::AsFd;

use common::fresh;
use serde_json::Value;
use tombolo_layout::{limits, state::Phase};
use tombolo_mem::{Mapped, PeerData, PeerSegment, PeerWord, check_sealed, create_sealed};
use tombolo_ring::{Error, FenceMode, Mode, Reader, Side, Writer, halves};

fn vectors(name: &str) -> Value {
    let path = format!("{}/../../../spec/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap()
}

fn number(value: &Value) -> u64 {
    let text = value.as_str().expect("a number as a string");
    u64::from_str_radix(text.strip_prefix("0x").expect("hexadecimal"), 16).unwrap()
}

fn bytes(value: &Value) -> Vec<u8> {
    let hex = value["hex"].as_str().expect("hex");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// A pipe, and the memory of both its endpoints as any process may read it.
struct Traced {
    writer: Writer<Mapped>,
    reader: Reader<Mapped>,
    writers: PeerSegment,
    readers: PeerSegment,
    messages: bool,
}

impl Traced {
    fn new(trace: &Value) -> Self {
        let (capacity, start) = (number(&trace["capacity"]), number(&trace["start"]));
        let messages = trace["messages"].as_bool().unwrap();
        let ((a, writers), (b, readers)) = (fresh(capacity, 0, start), fresh(capacity, 0, start));
        let mode = Mode { messages, ordering: FenceMode::Fences };
        let writer = halves(a, &readers, mode).unwrap().0.writer;
        let reader = halves(b, &writers, mode).unwrap().0.reader;
        Self { writer, reader, writers, readers, messages }
    }

    fn run(&mut self, what: &str, given: &[u8]) -> Result<(), Error> {
        match what.split(' ').collect::<Vec<_>>()[..] {
            ["begin"] => {}
            ["write"] if self.messages => assert_eq!(self.writer.send(given)?, Some(())),
            ["write"] => assert_eq!(self.writer.write(given)?, Some(given.len())),
            ["read"] if self.messages => {
                let mut buffer = vec![0; 4096];
                assert_eq!(self.reader.recv(&mut buffer)?, Some(given.len()));
                assert_eq!(buffer[..given.len()], *given);
            }
            ["read"] if given.is_empty() => assert_eq!(self.reader.read(&mut [0])?, None),
            ["read"] => {
                let mut buffer = vec![0; given.len()];
                assert_eq!(self.reader.read(&mut buffer)?, Some(given.len()));
                assert_eq!(buffer, given);
            }
            ["none"] => assert_eq!(self.reader.recv(&mut [0])?, None),
            ["arm", side, need] => {
                let need = need.parse().unwrap();
                if side == "writer" {
                    assert!(!self.writer.ready(need)?);
                    self.writer.arm(need);
                    self.writer.before_sleep();
                    assert!(!self.writer.ready(need)?);
                } else {
                    assert!(!self.reader.ready(need)?);
                    self.reader.arm(need);
                    self.reader.before_sleep();
                    assert!(!self.reader.ready(need)?);
                }
            }
            ["close", "writer"] => self.writer.close(),
            ["abort", "writer"] => self.writer.abort(),
            ["close", "reader"] => self.reader.close(),
            ["end"] => {
                let said = self.word("writer_state").to_le_bytes()[0];
                let phase = if said == 2 { Phase::Closed } else { Phase::Aborted };
                assert_eq!(self.reader.finished()?, Some(phase));
            }
            _ => panic!("{what}: no such step"),
        }
        Ok(())
    }

    /// Returns the word `name` of this pipe, at the offset that the vectors give it.
    fn word(&self, name: &str) -> u64 {
        let of_reader = ["head", "want_data", "reader_state"].contains(&name);
        let segment = if of_reader { &self.readers } else { &self.writers };
        segment.word(number(&vectors("word-offset")[name]) as usize).load_relaxed().hint()
    }
}

#[test]
fn m5_r1_r2_r3_r5_r10_r12_r16_r17_r20_traces_leave_the_bytes_that_the_vectors_say() {
    let traces = vectors("ring-trace");
    for trace in traces.as_array().unwrap() {
        let mut pipe = Traced::new(trace);
        for (index, step) in trace["steps"].as_array().unwrap().iter().enumerate() {
            let place = format!("{}, step {index}: {}", trace["name"], step["do"]);
            pipe.run(step["do"].as_str().unwrap(), &bytes(step)).unwrap_or_else(|error| panic!("{place}: {error}"));
            let owed = pipe.writer.take_notification() | pipe.reader.take_notification();
            assert_eq!(Value::Bool(owed), step["rings"], "{place}: rings");
            for (name, value) in step["words"].as_object().unwrap() {
                assert_eq!(pipe.word(name), number(value), "{place}: {name}");
            }
            for range in step["data"].as_array().unwrap() {
                let mut there = vec![0; bytes(range).len()];
                pipe.writers.data(limits::CONTROL_LEN as usize).copy_out(number(&range["offset"]) as usize, &mut there);
                assert_eq!(there, bytes(range), "{place}: data");
            }
        }
    }
}

#[test]
#[should_panic(expected = "rings")]
fn r12_canary_trace_with_a_ring_too_few_is_noticed() {
    let trace = vectors("ring-trace").as_array().unwrap()[0].clone();
    let mut pipe = Traced::new(&trace);
    for step in trace["steps"].as_array().unwrap() {
        pipe.run(step["do"].as_str().unwrap(), &bytes(step)).unwrap();
        let _ = (pipe.writer.take_notification(), pipe.reader.take_notification());
        assert_eq!(Value::Bool(false), step["rings"], "rings");
    }
}

#[test]
fn m5_m6_fresh_segment_is_all_there_and_zero_but_for_its_header() {
    let len = (limits::CONTROL_LEN + limits::CAPACITY_MIN) as usize;
    let (segment, fd) = create_sealed("tombolo-test", len).unwrap();
    assert_eq!(check_sealed(fd.as_fd(), len as u64), Ok(len), "sealed, and not sparse");
    let mut all = vec![0xee; len];
    let seen = PeerSegment::map(fd.as_fd(), len).unwrap();
    seen.data(0).copy_out(0, &mut all);
    assert!(all.iter().all(|byte| *byte == 0));
    drop(segment);

    let (_own, seen) = fresh(limits::CAPACITY_MIN, 0, 0);
    seen.data(0).copy_out(0, &mut all);
    assert!(all[..0x40].iter().any(|byte| *byte != 0));
    assert!(all[0x40..].iter().all(|byte| *byte == 0), "words, what is reserved, and data");
}
