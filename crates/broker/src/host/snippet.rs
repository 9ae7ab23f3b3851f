// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates what QEMU and libvirt must be told for a domain to have links.

use std::path::Path;

use tombolo_control::{Form, Name};

use crate::{
    config::{Config, Domain, MachineType},
    host::{
        paths::{device_socket, qmp_socket},
        qemu::PORT,
    },
};

/// First slot of q35's root bus that holds root ports, eight in each slot.
const PORTS_AT: u16 = 0x18;

/// Size of a region for which a root port has room at least, in bytes.
const ROOM_MIN: u64 = 1 << 20;

/// Returns the snippet as lines.
#[must_use]
pub fn lines(form: Form, name: &Name, domain: &Domain, folder: &Path, config: &Config) -> Vec<String> {
    let device = device_socket(folder, name.as_str()).display().to_string();
    let qmp = qmp_socket(folder, config, name.as_str()).display().to_string();
    match form {
        Form::Qemu => {
            let mut lines = vec![
                format!("-chardev socket,id=tombolo,path={}", comma(&device)),
                format!("-device ivshmem-doorbell,id=tombolo,chardev=tombolo,vectors={}", domain.vectors),
                format!("-qmp unix:{},server=on,wait=off", comma(&qmp)),
            ];
            lines.extend(ports(name, domain, config).map(|port| format!("-device {port}")));
            lines
        }
        Form::Libvirt => {
            let mut lines = vec![
                format!("<!-- tombolo, domain {name}: the first part goes into <devices> -->"),
                "<shmem name='tombolo'>".into(),
                "  <model type='ivshmem-doorbell'/>".into(),
                format!("  <server path='{}'/>", xml(&device)),
                format!("  <msi vectors='{}'/>", domain.vectors),
                "</shmem>".into(),
                "<!-- this goes into <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>; links are plugged".into(),
                "     at run time through this socket, as read-only regions are nothing that <shmem> knows -->".into(),
                "<qemu:commandline>".into(),
            ];
            let mut argument = |text: &str| lines.push(format!("  <qemu:arg value='{}'/>", xml(text)));
            argument("-qmp");
            argument(&format!("unix:{},server=on,wait=off", comma(&qmp)));
            for port in ports(name, domain, config) {
                argument("-device");
                argument(&port);
            }
            lines.push("</qemu:commandline>".into());
            lines
        }
    }
}

/// Returns the root ports of q35, at the end of the root bus. Firmware leaves room behind each port for the largest
/// region that the configuration has for this domain. Unasked, it leaves less, and the guest could not map what is
/// plugged in. The room is twice the region, because it may begin at any MiB, but a region only at a multiple of its
/// size.
fn ports(name: &Name, domain: &Domain, config: &Config) -> impl Iterator<Item = String> {
    let ports = if domain.machine == MachineType::Q35 { domain.ports } else { 0 };
    let links = config.links.iter().filter(|(ends, _)| ends.contains(name));
    let room = links.map(|(_, size)| *size).chain([config.region]).max().unwrap_or_default().max(ROOM_MIN);
    (0..ports).map(move |port| {
        let (slot, function) = (PORTS_AT + port / 8, port % 8);
        let multi = if function == 0 { ",multifunction=on" } else { "" };
        format!(
            "pcie-root-port,id={PORT}{port},bus=pcie.0,addr={slot:#x}.{function},chassis={},io-reserve=0,\
             pref64-reserve={}M{multi}",
            port + 100,
            (2 * room) >> 20
        )
    })
}

/// Doubles each comma, because QEMU's options end at a single one.
fn comma(text: &str) -> String {
    text.replace(',', ",,")
}

fn xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snippet(form: Form, text: &str) -> String {
        let config = Config::parse(Path::new("t"), text).unwrap();
        let name = "vm".parse().unwrap();
        lines(form, &name, &config.domains["vm"], Path::new("/run/a,b"), &config).join("\n")
    }

    #[test]
    fn qemu_is_told_of_the_device_the_control_socket_and_the_ports() {
        let pc = snippet(Form::Qemu, "[domain.vm]\nvectors = 4\n");
        assert_eq!(
            pc,
            "-chardev socket,id=tombolo,path=/run/a,,b/vm.ivshmem\n\
             -device ivshmem-doorbell,id=tombolo,chardev=tombolo,vectors=4\n\
             -qmp unix:/run/a,,b/vm.qmp,server=on,wait=off"
        );
        let q35 = snippet(
            Form::Qemu,
            "[domain.vm]\nmachine = \"q35\"\nports = 10\n[[allow]]\nfrom = \"vm\"\nto = \"host\"\nservice = \"*\"\n[[link]]\nbetween = [\"vm\", \"host\"]\nsize = \"64MiB\"\n",
        );
        assert_eq!(q35.matches("pcie-root-port").count(), 10);
        let last = "id=tombolo-p-9,bus=pcie.0,addr=0x19.1,chassis=109,io-reserve=0,pref64-reserve=128M";
        assert!(q35.contains(last), "{q35}");
    }

    #[test]
    fn libvirt_is_told_the_same_with_its_own_quotes() {
        let text = snippet(Form::Libvirt, "[domain.vm]\nqmp = \"/a'b/q\"\n");
        assert!(text.contains("<server path='/run/a,b/vm.ivshmem'/>"), "{text}");
        assert!(text.contains("value='unix:/a&apos;b/q,server=on,wait=off'"), "{text}");
        assert!(text.lines().all(|line| line.len() < 900));
    }
}
