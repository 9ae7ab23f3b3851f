// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports the functions of `libxenvchan.h`.
#![allow(unsafe_code)]

use libc::{c_char, c_int};

use crate::{
    acceptor,
    border::{Outcome, guard, guard_with, last},
    client,
    place::{Role, place},
    pointers::{Bytes, Ctrl, Log, Room, Text},
};

/// Returns `len` as an int, at most the largest int.
pub(crate) fn int(len: usize) -> c_int {
    c_int::try_from(len).unwrap_or(c_int::MAX)
}

pub(crate) fn serve(domain: c_int, path: &str, read_min: usize, write_min: usize, blocking: bool) -> Outcome<Ctrl> {
    let place = place(Role::Server, domain, path)?;
    let vchan = acceptor::serve(&place, read_min, write_min);
    let vchan = vchan.map_err(|fault| fault.of(&format!("no vchan for domain {domain} at {place}")))?;
    Ok(Ctrl::give(vchan, true, path, blocking))
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_server_init(
    logger: Log,
    domain: c_int,
    path: Text,
    read_min: usize,
    write_min: usize,
) -> Ctrl {
    guard_with(Ctrl::NONE, || serve(domain, path.get()?, read_min, write_min, false), |fault| logger.log_fault(fault))
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_client_init(logger: Log, domain: c_int, path: Text) -> Ctrl {
    guard_with(
        Ctrl::NONE,
        || {
            let place = place(Role::Client, domain, path.get()?)?;
            let vchan = client::join(&place);
            let vchan = vchan.map_err(|fault| fault.of(&format!("no vchan to domain {domain} at {place}")))?;
            Ok(Ctrl::give(vchan, false, path.get()?, false))
        },
        |fault| logger.log_fault(fault),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_close(ctrl: Ctrl) {
    guard((), || {
        drop(ctrl.into_box());
        Ok(())
    });
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_recv(ctrl: Ctrl, mut data: Room, size: usize) -> c_int {
    guard(-1, || {
        let handle = ctrl.get()?;
        handle.vchan.0.read(data.get(size)?, true, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_read(ctrl: Ctrl, mut data: Room, size: usize) -> c_int {
    guard(-1, || {
        let handle = ctrl.get()?;
        handle.vchan.0.read(data.get(size)?, false, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_send(ctrl: Ctrl, data: Bytes, size: usize) -> c_int {
    guard(-1, || {
        let handle = ctrl.get()?;
        handle.vchan.0.write(data.get(size)?, true, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_write(ctrl: Ctrl, data: Bytes, size: usize) -> c_int {
    guard(-1, || {
        let handle = ctrl.get()?;
        handle.vchan.0.write(data.get(size)?, false, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_wait(ctrl: Ctrl) -> c_int {
    guard(-1, || ctrl.get()?.vchan.0.wait().map(|()| 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_fd_for_select(ctrl: Ctrl) -> c_int {
    guard(-1, || ctrl.get()?.vchan.0.fd())
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_is_open(ctrl: Ctrl) -> c_int {
    guard(0, || {
        let handle = ctrl.get()?;
        Ok(handle.vchan.0.is_open(handle.ways()).into())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_data_ready(ctrl: Ctrl) -> c_int {
    guard(0, || ctrl.get()?.vchan.0.data_ready().map(int))
}

#[unsafe(no_mangle)]
pub extern "C" fn libxenvchan_buffer_space(ctrl: Ctrl) -> c_int {
    guard(0, || ctrl.get()?.vchan.0.buffer_space().map(int))
}

#[unsafe(no_mangle)]
pub extern "C" fn tombolo_vchan_last_error() -> *const c_char {
    guard(c"".as_ptr(), || Ok(last()))
}
