#!/usr/bin/env bash
# Hosts that are network namespaces of this machine, joined by a bridge, each link with a rate.
#
#   multihost.sh --hosts P [--rate RATE] [--burst SIZE] [--mtu N] [--port N] [--grace S] -- COMMAND...
#   multihost.sh --hosts P [...] --hold
#
# The first form runs COMMAND on every host, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
# MASTER_PORT and GLOO_SOCKET_IFNAME set as a launcher would, and lines of output marked by their
# host. It ends with a table of exit statuses and of the bytes that each host's interface has sent
# and received, and with the first status that is not 0. After a failure the other hosts have
# S seconds (10) to notice.
#
# --hold runs nothing: it prints one line "NAMESPACE ADDRESS" for each host, then takes lines from
# the standard input until that ends: "rate RATE" sets the rate of every link, "bytes" prints one
# line "SENT RECEIVED" for each host; either answers with a last line "ok".
#
# RATE is what tc takes (100mbit, 1gbit; the default "none" is unlimited) and holds for each
# direction of each host's link: a token bucket in the host's namespace limits what it sends, one
# at the bridge what it receives. SIZE (like 128k) is the bucket: 4 ms at the rate, at least 128k,
# which is two of the largest segments that the stack hands down at once, so that none is cut up.
set -euo pipefail

fail() { echo "multihost.sh: $*" >&2; exit 2; }
usage() { sed -n '4,5p' "$0" | sed 's/^# *//' >&2; exit 2; }

hosts= rate=none burst= mtu=9000 port=29500 grace=10 hold=
while (($#)); do
    case $1 in
        --hosts | --rate | --burst | --mtu | --port | --grace)
            (($# > 1)) || fail "$1: got nothing, expected a value"
            printf -v "${1#--}" %s "$2"; shift 2 ;;
        --hold) hold=1; shift ;;
        --) shift; break ;;
        *) usage ;;
    esac
done
[[ $hosts =~ ^[0-9]+$ ]] && ((hosts >= 1 && hosts <= 250)) || fail "--hosts: got '$hosts', expected 1 to 250"
[[ $mtu =~ ^[0-9]+$ && $port =~ ^[0-9]+$ && $grace =~ ^[0-9]+$ ]] || fail "--mtu, --port, --grace: expected whole numbers"
[[ $hold ]] || (($#)) || usage
[[ $rate == none || $rate =~ ^[0-9]+[kmg]?bit$ ]] || fail "--rate: got '$rate', expected one like 100mbit or none"
for tool in ip tc; do
    command -v "$tool" >/dev/null || fail "$tool: not found, expected the package iproute2"
done
((EUID == 0)) || fail "needs root: network namespaces are made; run it with sudo"

name=sar$$ net=10.77.0
declare -a pids=()
# No chatter of IPv6 among the counted bytes, a congestion control that every kernel lets a
# namespace choose, and at most 1 MB of a connection under way: the queues hold that of several.
quiet='echo reno > /proc/sys/net/ipv4/tcp_congestion_control
    echo 4096 65536 1048576 > /proc/sys/net/ipv4/tcp_wmem
    if [ -e /proc/sys/net/ipv6/conf/default/disable_ipv6 ]; then
        echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
    fi'

bits() { # bits per second of a rate
    local number=${1%bit}
    case $number in
        *k) echo $((${number%k} * 1000)) ;;
        *m) echo $((${number%m} * 1000000)) ;;
        *g) echo $((${number%g} * 1000000000)) ;;
        *) echo "$number" ;;
    esac
}

limit() { # namespace device: gives the device the rate
    if [[ $rate == none ]]; then
        tc -n "$1" qdisc del dev "$2" root 2>/dev/null || true
        return
    fi
    local per_second bucket
    per_second=$(bits "$rate")
    bucket=$((per_second / 8 / 250))
    ((bucket >= 131072)) || bucket=131072
    # The queue behind the bucket holds 400 ms, so that several senders to one host lose nothing.
    tc -n "$1" qdisc replace dev "$2" root tbf rate "$rate" burst "${burst:-$bucket}" \
        limit $((bucket + per_second / 20))
}

limit_all() {
    for ((i = 0; i < hosts; i++)); do
        limit "$name-$i" eth0
        limit "$name-hub" "port$i"
    done
}

counter() { ip netns exec "$name-$1" cat "/sys/class/net/eth0/statistics/$2_bytes"; }

clean() {
    trap - EXIT INT TERM
    for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    for space in $(ip netns list | awk -v prefix="$name-" 'index($1, prefix) == 1 { print $1 }'); do
        ip netns pids "$space" | xargs -r kill -KILL 2>/dev/null || true
        ip netns del "$space" || true
    done
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ip netns add "$name-hub"
ip -n "$name-hub" link add bridge mtu "$mtu" type bridge
ip -n "$name-hub" link set bridge up
for ((i = 0; i < hosts; i++)); do
    ip netns add "$name-$i"
    ip netns exec "$name-$i" sh -c "$quiet"
    ip -n "$name-hub" link add "port$i" mtu "$mtu" type veth peer name eth0 mtu "$mtu" netns "$name-$i"
    ip -n "$name-hub" link set "port$i" master bridge
    ip -n "$name-hub" link set "port$i" up
    ip -n "$name-$i" address add "$net.$((i + 1))/24" dev eth0
    ip -n "$name-$i" link set lo up
    ip -n "$name-$i" link set eth0 up
done
limit_all

if [[ $hold ]]; then
    for ((i = 0; i < hosts; i++)); do echo "$name-$i $net.$((i + 1))"; done
    while read -r order value; do
        case $order in
            rate) rate=$value; limit_all ;;
            bytes) for ((i = 0; i < hosts; i++)); do echo "$(counter $i tx) $(counter $i rx)"; done ;;
            *) fail "got '$order', expected rate or bytes" ;;
        esac
        echo ok
    done
    exit 0
fi

for ((i = 0; i < hosts; i++)); do
    setsid ip netns exec "$name-$i" env RANK="$i" WORLD_SIZE="$hosts" LOCAL_RANK=0 \
        MASTER_ADDR="$net.1" MASTER_PORT="$port" GLOO_SOCKET_IFNAME=eth0 "$@" \
        > >(sed -u "s/^/[$i] /") 2> >(sed -u "s/^/[$i] /" >&2) &
    pids[i]=$!
done

declare -a codes=()
first=0 last=0
while ((${#codes[@]} < hosts)); do
    for ((i = 0; i < hosts; i++)); do
        if [[ ! ${codes[i]:-} ]] && ! kill -0 "${pids[i]}" 2>/dev/null; then
            codes[i]=0
            wait "${pids[i]}" || codes[i]=$?
            ((first)) || first=${codes[i]} last=$((SECONDS + grace))
        fi
    done
    if ((first && SECONDS >= last)); then
        for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
    fi
    sleep 0.1
done
printf '%4s %6s %14s %14s\n' host exit sent received
for ((i = 0; i < hosts; i++)); do
    printf '%4d %6d %14d %14d\n' "$i" "${codes[i]}" "$(counter $i tx)" "$(counter $i rx)"
done
exit "$first"
