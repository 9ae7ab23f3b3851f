// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports the functions of Qubes' `libvchan.h`: ports instead of paths, and calls that block unless told not to.
#![allow(unsafe_code)]

use libc::c_int;

use crate::{
    border::{Fault, Outcome, complain, guard, guard_with},
    client,
    place::{Role, place},
    pointers::{Bytes, Ctrl, OutFd, Room},
    vchan::WAITING,
    xen::{int, serve},
};

/// Returns the path where Qubes' servers keep a port for a client's domain, or where the client finds it.
fn path(role: Role, domain: c_int, port: c_int) -> Outcome<String> {
    match (role, port) {
        (_, ..0) => Err(Fault::with(libc::EINVAL, format!("{port} is no port"))),
        (Role::Server, _) => Ok(format!("data/vchan/{domain}/{port}")),
        (Role::Client, _) => Ok(format!("/local/domain/{domain}/data/vchan/{{self}}/{port}")),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_server_init(domain: c_int, port: c_int, read_min: usize, write_min: usize) -> Ctrl {
    guard_with(Ctrl::NONE, || serve(domain, &path(Role::Server, domain, port)?, read_min, write_min, true), complain)
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_client_init(domain: c_int, port: c_int) -> Ctrl {
    guard_with(
        Ctrl::NONE,
        || {
            let path = path(Role::Client, domain, port)?;
            let place = place(Role::Client, domain, &path)?;
            let vchan = client::join_in_time(&place);
            let vchan = vchan.map_err(|fault| fault.of(&format!("no vchan to domain {domain} at {place}")))?;
            Ok(Ctrl::give(vchan, false, &path, true))
        },
        complain,
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_client_init_async(domain: c_int, port: c_int, watch_fd: OutFd) -> Ctrl {
    guard_with(
        Ctrl::NONE,
        || {
            watch_fd.check()?;
            let path = path(Role::Client, domain, port)?;
            let place = place(Role::Client, domain, &path)?;
            let vchan = client::join_later(place)?;
            watch_fd.put(vchan.0.arrival.watch()?)?;
            Ok(Ctrl::give(vchan, false, &path, true))
        },
        complain,
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_client_init_async_finish(ctrl: Ctrl, blocking: bool) -> c_int {
    guard_with(
        -1,
        || {
            let handle = ctrl.get()?;
            if !handle.vchan.0.finish()? {
                return Ok(1);
            }
            handle.set_blocking(blocking);
            Ok(0)
        },
        complain,
    )
}

/// Returns the handle, or an error if it is a client that has not reached its server yet.
fn joined(ctrl: &Ctrl) -> Outcome<&crate::pointers::Handle> {
    let handle = ctrl.get()?;
    if handle.vchan.0.arrival.is_joining() {
        return Err(Fault::new(libc::EAGAIN, "not connected yet: libvchan_client_init_async_finish comes first"));
    }
    Ok(handle)
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_write(ctrl: Ctrl, data: Bytes, size: usize) -> c_int {
    guard(-1, || {
        let handle = joined(&ctrl)?;
        handle.vchan.0.write(data.get(size)?, false, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_send(ctrl: Ctrl, data: Bytes, size: usize) -> c_int {
    guard(-1, || {
        let handle = joined(&ctrl)?;
        handle.vchan.0.write(data.get(size)?, true, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_read(ctrl: Ctrl, mut data: Room, size: usize) -> c_int {
    guard(-1, || {
        let handle = joined(&ctrl)?;
        handle.vchan.0.read(data.get(size)?, false, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_recv(ctrl: Ctrl, mut data: Room, size: usize) -> c_int {
    guard(-1, || {
        let handle = joined(&ctrl)?;
        handle.vchan.0.read(data.get(size)?, true, handle.ways()).map(int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_wait(ctrl: Ctrl) -> c_int {
    guard(-1, || {
        let handle = ctrl.get()?;
        if handle.vchan.0.arrival.is_joining() { Ok(0) } else { handle.vchan.0.wait().map(|()| 0) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_close(ctrl: Ctrl) {
    guard((), || {
        drop(ctrl.into_box());
        Ok(())
    });
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_fd_for_select(ctrl: Ctrl) -> c_int {
    guard(-1, || joined(&ctrl)?.vchan.0.fd())
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_is_open(ctrl: Ctrl) -> c_int {
    guard(0, || {
        let handle = ctrl.get()?;
        Ok(if handle.vchan.0.arrival.is_joining() { WAITING } else { handle.vchan.0.is_open(handle.ways()) }.into())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_data_ready(ctrl: Ctrl) -> c_int {
    guard(0, || {
        let handle = ctrl.get()?;
        if handle.vchan.0.arrival.is_joining() { Ok(0) } else { handle.vchan.0.data_ready().map(int) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_buffer_space(ctrl: Ctrl) -> c_int {
    guard(0, || {
        let handle = ctrl.get()?;
        if handle.vchan.0.arrival.is_joining() { Ok(0) } else { handle.vchan.0.buffer_space().map(int) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn libvchan_set_blocking(ctrl: Ctrl, blocking: bool) {
    guard((), || {
        ctrl.get()?.set_blocking(blocking);
        Ok(())
    });
}
