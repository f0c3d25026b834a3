# type: ignore  # torchrec is served at run time
"""A learning rate that climbs, stays, and falls: a scheduler over whatever optimizer has groups."""

from torch.optim.lr_scheduler import _LRScheduler


class LRPolicyScheduler(_LRScheduler):
    def __init__(self, optimizer, num_warmup_steps, decay_start_step, num_decay_steps):
        self.warmup, self.start, self.decay = num_warmup_steps, decay_start_step, num_decay_steps
        super().__init__(optimizer)

    def get_lr(self):
        step = self._step_count
        if step < self.warmup:
            return [rate * step / self.warmup for rate in self.base_lrs]
        if self.decay and self.start <= step < self.start + self.decay:
            left = 1 - (step - self.start) / self.decay
            return [max(1e-6, rate * left**2) for rate in self.base_lrs]
        return [*self.base_lrs]
