// SPDX-License-Identifier: GPL-2.0
/*
 * Interrupts, and how many are too many
 *
 * A peer may ring as often as it likes. One that follows the protocol rings
 * only who asked for it, so nearly every interrupt wakes somebody. Each
 * interrupt costs its vector something, more if it woke nobody, and a vector
 * that has spent too much within a tick is closed for a while: twice as long
 * each time, until there was a second of peace. What was rung meanwhile is
 * found when it opens again, and by whoever polls or reads before that.
 *
 * A storm that goes on is told: whoever polls a link that is rung there hears
 * of it (POLLPRI), and may have the peer's doorbell taken away.
 *
 * Why not simply one interrupt, then closed until somebody reads: to close and
 * to open are exits of a virtual machine, and would double the price of each
 * wake-up for a peer that behaves.
 */

#include <linux/io.h>
#include <linux/jiffies.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "tombolo.h"

#define REG_DOORBELL	12

static unsigned int budget = 1024;
module_param(budget, uint, 0644);
MODULE_PARM_DESC(budget, "what interrupts of a vector may cost within a tick: 1 each, 16 if it woke nobody");

#define COST_USEFUL	1
#define COST_NEEDLESS	16
#define PENALTY_MAX	(HZ / 4)
#define PENALTY_TOLD	8

/* Wakes whoever was rung. True if that was anybody. */
static bool vector_look(struct vector *vector)
{
	struct slice *slice;
	bool woke = false;

	lockdep_assert_held(&vector->lock);
	list_for_each_entry(slice, &vector->slices, on_vector)
		woke |= tombolo_slice_look(slice);
	return woke;
}

static void vector_charge(struct vector *vector, unsigned int cost)
{
	struct slice *slice;

	if (time_after_eq(jiffies, vector->window_end)) {
		vector->window_end = jiffies + 1;
		vector->spent = 0;
	}
	vector->spent += cost;
	if (vector->spent <= READ_ONCE(budget) || vector->stopping)
		return;

	if (!vector->penalty || time_after(jiffies, vector->last_storm + HZ))
		vector->penalty = 1;
	else
		vector->penalty = min_t(unsigned long, 2 * vector->penalty, PENALTY_MAX);
	vector->storms++;
	vector->last_storm = jiffies + vector->penalty;
	vector->spent = 0;
	disable_irq_nosync(vector->irq);
	schedule_delayed_work(&vector->rearm, vector->penalty);
	if (vector->penalty >= PENALTY_TOLD)
		list_for_each_entry(slice, &vector->slices, on_vector)
			wake_up_all(&slice->link->wq);
}

/* Whether there is a storm that goes on. */
bool tombolo_vector_storms(struct vector *vector)
{
	bool storms;

	spin_lock_irq(&vector->lock);
	storms = vector->penalty >= PENALTY_TOLD &&
		 time_before(jiffies, vector->last_storm + HZ);
	spin_unlock_irq(&vector->lock);
	return storms;
}

static void vector_rearm(struct work_struct *work)
{
	struct vector *vector = container_of(work, struct vector, rearm.work);

	enable_irq(vector->irq);
	spin_lock_irq(&vector->lock);
	vector_look(vector);
	spin_unlock_irq(&vector->lock);
}

static irqreturn_t vector_irq(int irq, void *arg)
{
	struct vector *vector = arg;

	spin_lock(&vector->lock);
	vector->interrupts++;
	vector_charge(vector, vector_look(vector) ? COST_USEFUL : COST_NEEDLESS);
	spin_unlock(&vector->lock);
	return IRQ_HANDLED;
}

static void vector_stop(struct vector *vector)
{
	spin_lock_irq(&vector->lock);
	vector->stopping = true;
	spin_unlock_irq(&vector->lock);
	/* Opens it again, if it was closed: free_irq() expects that. */
	flush_delayed_work(&vector->rearm);
	free_irq(vector->irq, vector);
}

/* Takes what vectors there are: none in an ivshmem-plain device. */
int tombolo_vectors_start(struct tombolo *dev)
{
	int count, err;
	unsigned int i;

	if (!dev->pdev->msix_cap)
		return 0;
	count = pci_alloc_irq_vectors(dev->pdev, 1, TOMBOLO_VECTORS, PCI_IRQ_MSIX);
	if (count < 0)
		return count;
	dev->vector = kcalloc(count, sizeof(*dev->vector), GFP_KERNEL);
	if (!dev->vector) {
		pci_free_irq_vectors(dev->pdev);
		return -ENOMEM;
	}
	for (i = 0; i < count; i++) {
		struct vector *vector = &dev->vector[i];

		spin_lock_init(&vector->lock);
		vector->window_end = jiffies;
		INIT_LIST_HEAD(&vector->slices);
		INIT_DELAYED_WORK(&vector->rearm, vector_rearm);
		vector->irq = pci_irq_vector(dev->pdev, i);
		err = request_irq(vector->irq, vector_irq, 0, KBUILD_MODNAME, vector);
		if (err)
			goto err_stop;
		dev->vectors++;
	}
	return 0;

err_stop:
	tombolo_vectors_stop(dev);
	return err;
}

void tombolo_vectors_stop(struct tombolo *dev)
{
	unsigned int i;

	for (i = 0; i < dev->vectors; i++)
		vector_stop(&dev->vector[i]);
	if (dev->vector)
		pci_free_irq_vectors(dev->pdev);
}

/* Within tombolo_life, the bell being alive. */
void tombolo_ring(struct tombolo *bell, u32 whom)
{
	if (whom >> 16 != TOMBOLO_NOBODY)
		iowrite32(whom, bell->regs + REG_DOORBELL);
}
