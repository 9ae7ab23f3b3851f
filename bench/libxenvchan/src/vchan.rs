// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Xen's libxenvchan as a transport, and libtombolo-vchan in its place. The right end is the server and, by the layout
//! of the original, grants both rings; the left maps them.
//!
//! # Safety
//! An end is the address that one of the two openers returned and that was not null; it is used by one thread at a time and
//! closed once, when its value is dropped.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::hint::spin_loop;
use std::ptr::NonNull;

use tombolo_bench::error::FailedCall;
use tombolo_bench::job::{Mode, Test, Wait};
use tombolo_bench::transport::{Card, Context, End, Namespaces, Wire};
use tombolo_bench::{Error, Result};

unsafe extern "C" {
    fn bench_vchan_serve(which: c_int, client: c_int, path: *const c_char, ring: usize, blocking: c_int) -> *mut c_void;
    fn bench_vchan_call(which: c_int, server: c_int, path: *const c_char, blocking: c_int) -> *mut c_void;
    fn bench_vchan_write(vchan: *mut c_void, bytes: *const c_void, len: usize) -> c_int;
    fn bench_vchan_read(vchan: *mut c_void, bytes: *mut c_void, len: usize) -> c_int;
    fn bench_vchan_state(vchan: *mut c_void) -> c_int;
    fn bench_vchan_close(vchan: *mut c_void);
}

/// Whose library, and what it speaks.
#[derive(Clone, Copy)]
pub(crate) enum Library {
    /// Debian's.
    Original = 0,
    /// Ours, over channels.
    Ours = 1,
    /// Ours, by the layout of the original.
    Wire = 2,
}

/// What the right side offers one after the other.
pub(crate) struct Host {
    library: Library,
    path: CString,
    /// Made already, so that the left finds it.
    ready: Option<Side>,
}

/// An end, until it is closed.
pub(crate) struct Side(Option<NonNull<c_void>>);

// SAFETY: see the head of this file: it may move to another thread, and is not shared.
unsafe impl Send for Side {}

impl Side {
    /// What an opener returned.
    fn new(address: *mut c_void, opener: &'static str) -> Result<Self> {
        NonNull::new(address).map(|end| Self(Some(end))).ok_or_else(|| failed(opener))
    }

    fn address(&self) -> Result<*mut c_void> {
        self.0.map(NonNull::as_ptr).ok_or_else(|| Error::Spoiled("used after the end".into()))
    }

    fn is_closed(&self) -> bool {
        // SAFETY: (address) an opener returned it, and it is not closed yet.
        self.address().is_ok_and(|address| unsafe { bench_vchan_state(address) } == 0)
    }

    fn close(&mut self) {
        if let Some(end) = self.0.take() {
            // SAFETY: (address) an opener returned it, and nobody has it any more.
            unsafe { bench_vchan_close(end.as_ptr()) }
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.close();
    }
}

impl Wire for Library {
    type Host = Host;
    type End = Side;

    fn card(&self) -> Card {
        Card {
            name: match self {
                Self::Original => "libxenvchan",
                Self::Ours => "tombolo-vchan",
                Self::Wire => "tombolo-wire",
            },
            mode: Mode::Stream,
            variants: &[""],
            namespaces: Namespaces::Apart,
            tests: &[Test::Throughput, Test::Rate, Test::Latency, Test::Switches, Test::Cpu],
            waits: &[Wait::Spin, Wait::Sleep],
            size: None,
            rings: true,
        }
    }

    fn listen(&self, context: &Context) -> Result<(Host, String)> {
        let name = format!("bench-vchan-{}", std::process::id());
        let path = CString::new(format!("data/{name}")).map_err(|_| Error::Unsupported("a path with a zero".into()))?;
        let mut host = Host { library: *self, path, ready: None };
        host.ready = Some(host.serve(context)?);
        Ok((host, name))
    }

    fn accept(&self, host: &mut Host, context: &Context) -> Result<Side> {
        host.ready.take().map_or_else(|| host.serve(context), Ok)
    }

    fn connect(&self, name: &str, context: &Context) -> Result<Side> {
        let server = peer(context)?;
        let path = CString::new(format!("/local/domain/{server}/data/{name}"))
            .map_err(|_| Error::Unsupported("a path with a zero".into()))?;
        // SAFETY: (path) ends with a zero and lives through the call.
        let end = unsafe { bench_vchan_call(*self as c_int, server, path.as_ptr(), blocking(context)) };
        Side::new(end, "libxenvchan_client_init")
    }
}

impl Host {
    fn serve(&self, context: &Context) -> Result<Side> {
        let client = peer(context)?;
        // SAFETY: (path) ends with a zero and lives through the call.
        let end = unsafe { bench_vchan_serve(self.library as c_int, client, self.path.as_ptr(), context.job.ring, blocking(context)) };
        Side::new(end, "libxenvchan_server_init")
    }
}

/// The other domain, which Tombolo's addresses begin with.
fn peer(context: &Context) -> Result<c_int> {
    let number = context.channels.as_deref().and_then(|address| address.strip_prefix("xen:")?.parse().ok());
    number.ok_or_else(|| Error::Unsupported("which domain is the other: see --via xen:DOMID".into()))
}

/// Who is to spin asks again and again; else the library waits for an event.
fn blocking(context: &Context) -> c_int {
    c_int::from(context.job.wait != Some(Wait::Spin))
}

fn failed(call: &'static str) -> Error {
    FailedCall { call, source: std::io::Error::last_os_error() }.into()
}

impl End for Side {
    #[inline]
    fn send(&mut self, mut message: &[u8]) -> Result<()> {
        let end = self.address()?;
        while !message.is_empty() {
            // SAFETY: (address) an opener returned it, and it is not closed yet; (bytes) as long as is said.
            match unsafe { bench_vchan_write(end, message.as_ptr().cast(), message.len()) } {
                0 => spin_loop(),
                n if n > 0 => message = &message[n as usize..],
                _ => return Err(failed("libxenvchan_write")),
            }
        }
        Ok(())
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let end = self.address()?;
        loop {
            // SAFETY: (address) an opener returned it, and it is not closed yet; (bytes) as long as is said.
            match unsafe { bench_vchan_read(end, buffer.as_mut_ptr().cast(), buffer.len()) } {
                0 => spin_loop(),
                n if n > 0 => return Ok(n as usize),
                _ if self.is_closed() => return Ok(0),
                _ => return Err(failed("libxenvchan_read")),
            }
        }
    }

    /// The libraries know no half close: who closes ends all. What was sent lies in the server's memory, the right
    /// end's.
    fn finish(&mut self) -> Result<()> {
        self.close();
        Ok(())
    }
}
