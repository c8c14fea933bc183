"""Remote experts in a training loop that exists already: an ordinary Flax model under `jit`, and one new line in it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dmoe_jax import connect, feedforward, product_key

WIDTH, BATCH, STEPS = 16, 32, 90


class Classifier(nn.Module):
    """`experts` is the new line: a layer whose parameters, but for the router's, live on other machines."""

    mixture: object

    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(WIDTH)(x))
        hidden = self.mixture.linen(name="experts")(hidden)
        return nn.Dense(2)(hidden)


def batch(seed):
    """Is a point inside a ring?"""
    x = np.random.default_rng(seed).normal(size=(BATCH, 2)).astype(np.float32)
    return x, (np.linalg.norm(x, axis=1) > 1.1).astype(np.int32)


def main():
    with connect() as swarm:
        # Here experts and model share a process; `dmoe node` serves them from anywhere else.
        expert = feedforward(d_model=WIDTH)
        swarm.serve({"ring.[0:2].[0:2]": expert}, optimizer=optax.adam(3e-3), warm_up_rows=BATCH)
        mixture = swarm.mixture("ring", expert, product_key((2, 2)), k_best=2)
        mixture.check()  # are there experts of this shape?

        model, optimizer = Classifier(mixture), optax.adam(3e-3)
        params = model.init(jax.random.key(0), batch(0)[0])["params"]
        opt_state = optimizer.init(params)

        def loss_of(params, x, labels):
            logits = model.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        @jax.jit
        def train_step(params, opt_state, x, labels):
            (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x, labels)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        for step in range(STEPS):
            params, opt_state, loss = train_step(params, opt_state, *batch(step))
            if step % 30 == 0:
                print(f"step {step}: loss {loss:.3f}")
        x, labels = batch(-1 % 2**32)
        logits = jax.jit(model.apply)({"params": params}, x)
        print(f"accuracy {jnp.mean(logits.argmax(-1) == labels):.3f}; experts: {swarm.experts()}")


if __name__ == "__main__":
    main()
