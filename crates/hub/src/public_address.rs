//! Decides whether an IP address belongs to the public internet. Rows of a data set name hosts that nobody vouches for,
//! so no request for them may reach this machine, its network, or the metadata service of a cloud.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IPv4 networks that are not part of the public internet: IANA's registry of special-purpose addresses (RFC 6890), and
/// the address of the service that Azure offers its virtual machines.
const CLOSED_V4: [(Ipv4Addr, u32); 17] = [
    (Ipv4Addr::UNSPECIFIED, 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 31, 196, 0), 24),
    (Ipv4Addr::new(192, 52, 193, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 3),
];

/// IPv6 networks in `2000::/3` that are not part of the public internet: protocol assignments (with Teredo),
/// documentation, and 6to4, which leads on to an IPv4 address. Nothing outside of `2000::/3` is public.
const CLOSED_V6: [(Ipv6Addr, u32); 4] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Whether an address belongs to the public internet.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => {
            let among = |(base, bits): (Ipv6Addr, u32)| (base.to_bits() ^ address.to_bits()) >> (128 - bits) == 0;
            let is_open =
                || among((Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3)) && !CLOSED_V6.into_iter().any(among);
            behind(address).map_or_else(is_open, is_public_v4)
        }
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !CLOSED_V4.into_iter().any(|(base, bits)| (base.to_bits() ^ address.to_bits()) >> (32 - bits) == 0)
}

/// The IPv4 address that an IPv6 address stands for, if it is mapped (`::ffff:0:0/96`) or goes through NAT64
/// (`64:ff9b::/96`); `None` for any other.
fn behind(address: Ipv6Addr) -> Option<Ipv4Addr> {
    const MAPPED: u128 = Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0).to_bits();
    const NAT64: u128 = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0).to_bits();
    let bits = address.to_bits();
    let stands = [MAPPED, NAT64].into_iter().any(|base| (base ^ bits) >> 32 == 0);
    stands.then(|| Ipv4Addr::from_bits(bits as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_internet_is_public() {
        for public in [
            "1.1.1.1",
            "8.8.8.8",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.1",
            "168.63.129.15",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700::1111",
            "2001:4860:4860::8888",
            "2a00:1450:4001::1",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for closed in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.168.0.1",
            "198.18.0.1",
            "198.19.255.255",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.1.2.3",
            "::ffff:169.254.169.254",
            "64:ff9b::192.168.0.1",
            "64:ff9b:1::8.8.8.8",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "3fff::1",
            "4000::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(closed.parse().unwrap()), "{closed}");
        }
    }
}
