// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The layout of libxenvchan over the simulated Xen: grants, event channels and XenStore of two domains in this
//! process.

use std::thread;

use tombolo_backends::vchan::{Error, Live, Reader, Writer, join_in, serve_in};
use tombolo_domain_xen::FakeXen;

const PATH: &str = "data/vchan/7/42";

fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

fn write_all(writer: &mut Writer, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let written = writer.write(bytes).unwrap();
        bytes = &bytes[written..];
        if written == 0 {
            writer.wait_for(1).unwrap();
        }
    }
}

fn read_all(reader: &mut Reader, len: usize) -> Vec<u8> {
    let (mut bytes, mut done) = (vec![0; len], 0);
    while done < len {
        assert!(reader.wait_for(1).unwrap() > 0);
        done += reader.read(&mut bytes[done..]).unwrap();
    }
    bytes
}

#[test]
fn w3_two_domains_meet_in_xenstore_and_talk_both_ways() {
    for (read, write) in [(0, 0), (4096, 65_536), (1 << 20, 2000)] {
        let xen = FakeXen::new();
        let (five, seven) = (xen.domain(5), xen.domain(7));
        let (server, (mut reader, mut writer)) = serve_in(&five, 7, PATH, read, write).unwrap();
        assert_eq!(server.live(), Live::NotYet);
        let (mut their_reader, mut their_writer) = join_in(&seven, 5, "/local/domain/5/data/vchan/{self}/42").unwrap();
        assert_eq!(server.live(), Live::Here);
        assert_eq!((reader.capacity(), writer.capacity()), (their_writer.capacity(), their_reader.capacity()));
        let bytes = &noise(3 << 20);
        thread::scope(|scope| {
            scope.spawn(|| write_all(&mut writer, bytes));
            scope.spawn(|| write_all(&mut their_writer, bytes));
            scope.spawn(|| assert!(read_all(&mut reader, bytes.len()) == *bytes));
            assert!(read_all(&mut their_reader, bytes.len()) == *bytes);
        });
        assert_eq!(their_writer.write(b"last words").unwrap(), 10);
        drop((their_reader, their_writer));
        assert_eq!(server.live(), Live::Gone);
        assert_eq!(read_all(&mut reader, 10), b"last words");
        assert_eq!(reader.wait_for(1).unwrap(), 0);
        drop((server, reader, writer));
        assert_eq!(xen.grants(), 0, "a grant stayed behind");
        assert!(matches!(join_in(&seven, 5, "/local/domain/5/data/vchan/7/42"), Err(Error::NotFound(_))));
    }
}

#[test]
fn w3_third_domain_sees_nothing_of_it() {
    let xen = FakeXen::new();
    let (five, nine) = (xen.domain(5), xen.domain(9));
    let (_server, _halves) = serve_in(&five, 7, PATH, 0, 0).unwrap();
    assert!(matches!(join_in(&nine, 5, "/local/domain/5/data/vchan/7/42"), Err(Error::NotFound(_))));
}

#[test]
fn w3_where_there_is_no_xen_it_is_said() {
    if std::path::Path::new("/dev/xen/xenbus").exists() {
        let line = "SKIP w3_where_there_is_no_xen_it_is_said (needs no-xen): this is a domain of Xen's\n";
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        return;
    }
    let error = tombolo_backends::vchan::join(1, "data/vchan/0/1").unwrap_err();
    assert!(error.to_string().contains("no Xen domain"), "{error}");
}
