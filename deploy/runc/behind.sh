#!/bin/sh
# Run a command in a container behind a bridge whose only other neighbour is egressd (wiring: gateway).
#
#   behind.sh BRIDGE ADDRESS/BITS GATEWAY [container.py options] NAME -- COMMAND...
#
# As root, beside a running `egressd serve` that has the bridge in gateway.interfaces. Asks the daemon for a sandbox of the profile
# $EGRESSD_PROFILE, shows it the public certificates, and ends it with the command. $EGRESSD is how egressd is called.
set -eu

bridge=$1 address=$2 gateway=$3
shift 3
here=$(dirname "$(readlink -f "$0")")
egressd=${EGRESSD:-egressd}
name=egressd-$$
port=eg$$
sandbox=

end() {
    [ -z "$sandbox" ] || $egressd sandbox revoke "$sandbox" >/dev/null || true
    ip netns del "$name" 2>/dev/null || true
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ip netns add "$name"
ip link add "$port" type veth peer name eth0 netns "$name"
ip link set "$port" master "$bridge" up
ip -n "$name" link set lo up
ip -n "$name" addr add "$address" dev eth0
ip -n "$name" link set eth0 up
ip -n "$name" route add default via "$gateway"
# As container engines set it: a ping is a packet, and a packet is recorded.
ip netns exec "$name" sysctl -qw net.ipv4.ping_group_range="0 2147483647"
mac=$(ip -n "$name" -o link show eth0 | sed -n 's/.*link\/ether \([0-9a-f:]*\).*/\1/p')

made=$($egressd sandbox create --wiring gateway --source "${address%/*}" --mac "$mac" --port "$port" --format json)
sandbox=$(printf %s "$made" | python3 -c 'import json, sys; print(json.load(sys.stdin)["sandbox"]["id"])')

trust=$($egressd ca env --format docker)
folder=$(printf '%s\n' "$trust" | sed -n 's/^SSL_CERT_FILE=//p' | xargs dirname)
variables=$(printf '%s\n' "$trust" | sed -n 's/^\([A-Z_]*=[^ ]*\)$/--env=\1/p')
# shellcheck disable=SC2086 # one word for each variable
"$here/container.py" --network="/run/netns/$name" --resolver=198.18.0.1 --bind="$folder:ro" $variables "$@"
