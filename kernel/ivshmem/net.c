// SPDX-License-Identifier: GPL-2.0
/* Network interfaces: each belongs to an open file of /dev/net/tombolo. */

#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/nsproxy.h>
#include <linux/poll.h>
#include <linux/proc_fs.h>
#include <linux/rtnetlink.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <net/net_namespace.h>
#include <net/rtnetlink.h>

#include "net.h"

#define MTU_LEAST	68
#define MTU_MOST	65535

static int net_open(struct net_device *dev)
{
	struct tombolo_netdev *net = netdev_priv(dev);

	napi_enable(&net->napi);
	netif_start_queue(dev);
	tombolo_port_schedule(net);
	return 0;
}

static int net_stop(struct net_device *dev)
{
	struct tombolo_netdev *net = netdev_priv(dev);

	netif_stop_queue(dev);
	napi_disable(&net->napi);
	return 0;
}

static void net_get_stats(struct net_device *dev, struct rtnl_link_stats64 *stats)
{
	const struct tombolo_net_stat *stat = &((struct tombolo_netdev *)netdev_priv(dev))->stat;
	unsigned int i;

	stats->tx_packets = stat->sent[TOMBOLO_NET_FRAMES];
	stats->tx_bytes = stat->sent[TOMBOLO_NET_BYTES];
	stats->rx_packets = stat->received[TOMBOLO_NET_FRAMES];
	stats->rx_bytes = stat->received[TOMBOLO_NET_BYTES];
	for (i = TOMBOLO_NET_SHORT; i < TOMBOLO_NET_NOTIFICATIONS; i++)
		stats->tx_dropped += stat->sent[i];
	for (i = TOMBOLO_NET_SHORT; i < TOMBOLO_NET_MEMORY; i++)
		stats->rx_errors += stat->received[i];
	stats->rx_dropped = stat->received[TOMBOLO_NET_MEMORY];
}

/* Leaves to the stack the segments and checksums that the peer does not take (N-4). */
static netdev_features_t net_fix_features(struct net_device *dev, netdev_features_t features)
{
	struct tombolo_netdev *net = netdev_priv(dev);
	u64 gives = net->port.gives;

	if (!(gives & TOMBOLO_NET_CHECKSUM))
		features &= ~(NETIF_F_HW_CSUM | NETIF_F_GSO_MASK);
	if (!(gives & TOMBOLO_NET_TSO4))
		features &= ~NETIF_F_TSO;
	if (!(gives & TOMBOLO_NET_TSO6))
		features &= ~NETIF_F_TSO6;
	if (!(gives & TOMBOLO_NET_ECN))
		features &= ~NETIF_F_TSO_ECN;
	if (!(gives & TOMBOLO_NET_USO))
		features &= ~NETIF_F_GSO_UDP_L4;
	return features;
}

static netdev_features_t net_check_features(struct sk_buff *skb, struct net_device *dev,
					    netdev_features_t features)
{
	struct tombolo_netdev *net = netdev_priv(dev);

	if (skb_is_gso(skb) && skb->len > READ_ONCE(net->port.gives_most))
		features &= ~NETIF_F_GSO_MASK;
	return features;
}

/* The file's owner turns the carrier off when the peer's machine dies, which the link does not show. */
static int net_change_carrier(struct net_device *dev, bool on)
{
	struct tombolo_netdev *net = netdev_priv(dev);

	if (on && !tombolo_port_is_alive(net))
		return -ENOTCONN;
	if (on)
		netif_carrier_on(dev);
	else
		netif_carrier_off(dev);
	return 0;
}

/* poll_again() keeps the stack from calling it for a peer that is paused. */
static void net_timeout(struct net_device *dev, unsigned int queue)
{
	struct tombolo_netdev *net = netdev_priv(dev);

	net->stat.both[TOMBOLO_NET_TIMEOUTS]++;
	tombolo_port_schedule(net);
}

/* The interface goes, whoever removed it. Under rtnl_lock. */
static void net_uninit(struct net_device *dev)
{
	struct tombolo_netdev *net = netdev_priv(dev);
	struct net_file *file = net->file;

	if (net->linked)
		tombolo_port_give_up(net, NULL);
	if (!file)
		return;
	net->file = NULL;
	file->net = NULL;
	WRITE_ONCE(file->gone, true);
	wake_up_all(&file->wq);
}

static const struct net_device_ops net_ops = {
	.ndo_open = net_open,
	.ndo_stop = net_stop,
	.ndo_uninit = net_uninit,
	.ndo_start_xmit = tombolo_port_send,
	.ndo_tx_timeout = net_timeout,
	.ndo_get_stats64 = net_get_stats,
	.ndo_change_carrier = net_change_carrier,
	.ndo_fix_features = net_fix_features,
	.ndo_features_check = net_check_features,
	.ndo_set_mac_address = eth_mac_addr,
	.ndo_validate_addr = eth_validate_addr,
};

static const char counted[][ETH_GSTRING_LEN] = {
	"tx_frames", "tx_bytes", "tx_segments", "tx_full", "tx_short", "tx_long", "tx_header",
	"tx_feature", "tx_source", "tx_stale", "tx_refused", "tx_memory", "tx_notifications",
	"rx_frames", "rx_bytes", "rx_segments", "rx_full", "rx_short", "rx_long", "rx_header",
	"rx_feature", "rx_source", "rx_stale", "rx_refused", "rx_memory", "rx_notifications",
	"kicks", "polls", "rearms", "timeouts", "links", "corrupt",
};

#define COUNTED_EACH	(TOMBOLO_NET_NOTIFICATIONS + 1)
#define COUNTED_BOTH	(TOMBOLO_NET_CORRUPT + 1)
static_assert(ARRAY_SIZE(counted) == 2 * COUNTED_EACH + COUNTED_BOTH);

static void net_get_drvinfo(struct net_device *dev, struct ethtool_drvinfo *info)
{
	struct tombolo_netdev *net = netdev_priv(dev);

	strscpy(info->driver, KBUILD_MODNAME, sizeof(info->driver));
	if (net->linked)
		strscpy(info->bus_info, pci_name(net->port.own->half->dev->pdev),
			sizeof(info->bus_info));
}

static void net_get_strings(struct net_device *dev, u32 set, u8 *data)
{
	if (set == ETH_SS_STATS)
		memcpy(data, counted, sizeof(counted));
}

static int net_get_count(struct net_device *dev, int set)
{
	return set == ETH_SS_STATS ? ARRAY_SIZE(counted) : -EOPNOTSUPP;
}

static void net_get_counters(struct net_device *dev, struct ethtool_stats *stats, u64 *data)
{
	const struct tombolo_net_stat *stat = &((struct tombolo_netdev *)netdev_priv(dev))->stat;

	memcpy(data, stat->sent, COUNTED_EACH * sizeof(u64));
	memcpy(data + COUNTED_EACH, stat->received, COUNTED_EACH * sizeof(u64));
	memcpy(data + 2 * COUNTED_EACH, stat->both, COUNTED_BOTH * sizeof(u64));
}

static const struct ethtool_ops net_ethtool_ops = {
	.get_drvinfo = net_get_drvinfo,
	.get_link = ethtool_op_get_link,
	.get_strings = net_get_strings,
	.get_sset_count = net_get_count,
	.get_ethtool_stats = net_get_counters,
};

static int net_validate(struct nlattr *attrs[], struct nlattr *data[],
			struct netlink_ext_ack *extack)
{
	NL_SET_ERR_MSG(extack, "made by `tombolo net up`, which knows the peer");
	return -EOPNOTSUPP;
}

static struct rtnl_link_ops net_link_ops;

static void net_set_up(struct net_device *dev)
{
	ether_setup(dev);
	dev->netdev_ops = &net_ops;
	dev->ethtool_ops = &net_ethtool_ops;
	dev->rtnl_link_ops = &net_link_ops;
	dev->needs_free_netdev = true;
	dev->min_mtu = MTU_LEAST;
	dev->max_mtu = MTU_MOST;
	dev->priv_flags |= IFF_LIVE_ADDR_CHANGE;
	dev->watchdog_timeo = 10 * HZ;
}

static struct rtnl_link_ops net_link_ops = {
	.kind = "tombolo",
	.priv_size = sizeof(struct tombolo_netdev),
	.setup = net_set_up,
	.validate = net_validate,
};

/* Files */

static int file_open(struct inode *inode, struct file *file)
{
	struct net_file *own = kzalloc(sizeof(*own), GFP_KERNEL_ACCOUNT);

	if (!own)
		return -ENOMEM;
	init_waitqueue_head(&own->wq);
	file->private_data = own;
	return 0;
}

static int file_release(struct inode *inode, struct file *file)
{
	struct net_file *own = file->private_data;

	rtnl_lock();
	if (own->net)
		unregister_netdevice(own->net->dev);
	rtnl_unlock();
	kfree(own);
	return 0;
}

static long file_make(struct net_file *own, struct tombolo_net __user *user)
{
	struct net *space = current->nsproxy->net_ns;
	struct tombolo_netdev *net;
	struct tombolo_net arg;
	struct net_device *dev;
	int err;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	if (!ns_capable(space->user_ns, CAP_NET_ADMIN))
		return -EPERM;
	if (arg.name[sizeof(arg.name) - 1] || !arg.name[0] || arg.reserved ||
	    !is_valid_ether_addr(arg.address) || arg.mtu < MTU_LEAST || arg.mtu > MTU_MOST)
		return -EINVAL;

	dev = alloc_netdev(sizeof(*net), arg.name, NET_NAME_USER, net_set_up);
	if (!dev)
		return -ENOMEM;
	net = netdev_priv(dev);
	tombolo_port_init(net, dev);
	dev_net_set(dev, space);
	eth_hw_addr_set(dev, arg.address);
	dev->mtu = arg.mtu;
	dev->hw_features = NETIF_F_SG | NETIF_F_FRAGLIST | NETIF_F_HW_CSUM | NETIF_F_TSO |
			   NETIF_F_TSO6 | NETIF_F_TSO_ECN | NETIF_F_RXCSUM;
	if (TOMBOLO_KERNEL_USO)
		dev->hw_features |= NETIF_F_GSO_UDP_L4;
	dev->features = dev->hw_features | NETIF_F_HIGHDMA;
	dev->vlan_features = dev->features;
	netif_napi_add(dev, &net->napi, tombolo_port_poll);
	netif_carrier_off(dev);

	rtnl_lock();
	err = -EBUSY;
	if (own->net || own->gone)
		goto err_free;
	err = register_netdevice(dev);
	if (err)
		goto err_free;
	net->file = own;
	own->net = net;
	memcpy(arg.name, dev->name, sizeof(arg.name));
	arg.index = dev->ifindex;
	arg.takes = TOMBOLO_NET_TAKES;
	rtnl_unlock();
	return copy_to_user(user, &arg, sizeof(arg)) ? -EFAULT : 0;

err_free:
	rtnl_unlock();
	free_netdev(dev);
	return err;
}

static long file_link(struct net_file *own, const struct tombolo_net_link __user *user)
{
	struct tombolo_net_link arg;
	long err = -ENXIO;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	rtnl_lock();
	if (own->net && !ns_capable(dev_net(own->net->dev)->user_ns, CAP_NET_ADMIN))
		err = -EPERM;
	else if (own->net)
		err = tombolo_port_take_over(own->net, &arg);
	rtnl_unlock();
	return err;
}

static long file_unlink(struct net_file *own, struct tombolo_net_turn __user *user)
{
	struct tombolo_net_turn turn = {};
	long err = -ENOTCONN;

	rtnl_lock();
	if (own->net && own->net->linked) {
		tombolo_port_give_up(own->net, &turn);
		err = 0;
	}
	rtnl_unlock();
	if (!err && copy_to_user(user, &turn, sizeof(turn)))
		err = -EFAULT;
	return err;
}

static long file_stat(struct net_file *own, struct tombolo_net_stat __user *user)
{
	struct tombolo_net_stat stat;
	bool there;

	rtnl_lock();
	there = own->net;
	if (there)
		stat = own->net->stat;
	rtnl_unlock();
	if (!there)
		return -ENXIO;
	return copy_to_user(user, &stat, sizeof(stat)) ? -EFAULT : 0;
}

static long file_place(struct net_file *own, struct tombolo_net_place __user *user)
{
	struct tombolo_net_place place = {};
	struct net *space = NULL;
	long err;

	rtnl_lock();
	if (own->net) {
		space = get_net(dev_net(own->net->dev));
		memcpy(place.name, own->net->dev->name, sizeof(place.name));
		place.index = own->net->dev->ifindex;
	}
	rtnl_unlock();
	if (!space)
		return -ENXIO;
	err = -EPERM;
	if (ns_capable(space->user_ns, CAP_NET_ADMIN))
		err = copy_to_user(user, &place, sizeof(place)) ? -EFAULT : 0;
	if (!err)
		err = open_related_ns(&space->ns, get_net_ns);
	put_net(space);
	return err;
}

static long file_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct net_file *own = file->private_data;

	switch (cmd) {
	case TOMBOLO_IOC_NET:
		return file_make(own, (void __user *)arg);
	case TOMBOLO_IOC_NET_LINK:
		return file_link(own, (void __user *)arg);
	case TOMBOLO_IOC_NET_UNLINK:
		return file_unlink(own, (void __user *)arg);
	case TOMBOLO_IOC_NET_STAT:
		return file_stat(own, (void __user *)arg);
	case TOMBOLO_IOC_NET_PLACE:
		return file_place(own, (void __user *)arg);
	default:
		return -ENOTTY;
	}
}

static __poll_t file_poll(struct file *file, poll_table *wait)
{
	struct net_file *own = file->private_data;
	__poll_t events = 0;

	poll_wait(file, &own->wq, wait);
	if (READ_ONCE(own->gone))
		events |= EPOLLIN | EPOLLHUP;
	if (READ_ONCE(own->news))
		events |= EPOLLIN;
	return events;
}

static const struct file_operations file_ops = {
	.owner = THIS_MODULE,
	.open = file_open,
	.release = file_release,
	.poll = file_poll,
	.unlocked_ioctl = file_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice file_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "net_tombolo",
	.nodename = "net/tombolo",
	.fops = &file_ops,
	/* The function checks for CAP_NET_ADMIN as well. */
	.mode = 0600,
};

int tombolo_net_start(void)
{
	int err = rtnl_link_register(&net_link_ops);

	if (err)
		return err;
	err = misc_register(&file_device);
	if (err)
		rtnl_link_unregister(&net_link_ops);
	return err;
}

void tombolo_net_stop(void)
{
	misc_deregister(&file_device);
	rtnl_link_unregister(&net_link_ops);
}
