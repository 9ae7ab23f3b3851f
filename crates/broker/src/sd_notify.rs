// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Notifies the service manager: one datagram to the socket that it names in the environment.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// Environment variable that names the socket.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// Sends `what` to the service manager that started this process, if it gave a socket.
pub fn notify(what: &str) {
    if let Some(name) = env::var_os(VARIABLE)
        && let Err(error) = send(&name, what)
    {
        tracing::warn!("the service manager is not told {what:?}: {error}");
    }
}

fn send(name: &OsStr, what: &str) -> io::Result<()> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(what.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_arrives_at_a_socket_of_either_kind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("tombolo-test-{}", std::process::id());
        let sockets = [
            (path.as_os_str().to_owned(), UnixDatagram::bind(&path).unwrap()),
            (
                format!("@{name}").into(),
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap(),
            ),
        ];
        for (name, socket) in sockets {
            send(&name, "READY=1").unwrap();
            let mut said = [0; 16];
            assert_eq!(socket.recv(&mut said).unwrap(), 7);
            assert_eq!(&said[..7], b"READY=1");
        }
        assert!(send(OsStr::new("/nowhere"), "READY=1").is_err());
    }
}
