"""The distributed optimizer, as it runs on each device inside ``jax.shard_map``. Start here.

The files of this folder and their concepts, in the order in which data pass through them in a step:

========================  ======================================================================
``transformation.py``     ``tx`` as users call it. ``bind`` makes layout and schedule once for
                          the shapes of params.
``optimizer.py``          ``jda.distributed``: arguments, checked, become a config.
``config.py``             ``DistributedConfig``: algorithm, mesh, policy and strategy, all static.
``mesh_axes.py``          ``DataParallel``: which mesh axes shard and which replicate. How leaves
                          are cut over tensor axes.
``transport.py``          ``Transport``: XLA's collectives, or copies between the memory of
                          devices. Chosen with the config; says what follows for a step.
``layers.py``             ``Layers``: what a model gathers itself, in a scan or block by block.
                          ``rest_whole``: what devices hold whole between steps.
``layout.py``             ``Layout``, ``Bucket``: where every parameter is in the flat state.
``schedule.py``           ``Schedule``: what is sent, when, in which dtype. The step runs it,
                          ``plan`` counts it, ``audit`` compares it with the compiled program.
``layout_text.py``        The text of a layout, and its digest, which every state carries.
``state.py``              ``DistributedState``: flat arrays, scalars, the digest of the layout.
``model_axes.py``         Makes all mesh axes manual if some were left to XLA.
``shard.py``              ``Shard``: what a device has of a parameter, as a type.
``gather_params.py``      Gathers shards before the loss; reduces gradients to summed shards.
``step.py``               ``step_local``: the step, from gradients to new parameters. CONTRIBUTING
                          has it in one page.
``checks.py``             Errors for trees, shapes, dtypes and states that do not fit.
``accumulate.py``         Gradients over micro-batches, then summed over devices.
``packing.py``            Leaves into buckets and back. ``Span``: what a kernel call steps.
``block_positions.py``    Which blocks of a leaf a device has, for quantized state and random bits.
``bucket_leaves.py``      The leaves of a bucket out of flat arrays and into them, in programs of
                          few leaves, outside of ``jax.shard_map``.
``communication.py``      Runs the schedule: sums of gradients, and gathers of parameters.
``parts_of_gradients.py`` Gradients that arrived in parts: which are added before the update, and
                          which in its kernel.
``norms.py``              The global norm; norms of leaves and groups, from sums of the kernels.
``verdict.py``            ``Verdict``: the norm, whether the step is skipped, the kernel's scalars.
``calls.py``              ``Call``: what one kernel call steps, where that is in the flat arrays,
                          what it waits for, what is gathered after it. Calls of the average.
``store.py``              ``Store``: the flat arrays during a step, wherever they are.
``update.py``             One kernel call after another, and gathers of new parameters.
``main_params.py``        Exact values of params: a state begins with them; params follow them,
                          rounded to the model's dtype.
``average.py``            The moving average of the exact parameters.
``flat_arrays.py``        ``Field``: what a flat array holds of each parameter. ``Window``: where
                          a span is in one. Moments in codes.
``state_view.py``         ``StateView``: fields of a state by parameter, outside of
                          ``jax.shard_map``, in programs of few leaves.
``global_arrays.py``      Arrays outside of programs: copied, placed, fetched to the host.
``host_memory.py``        State in host memory. ``Stream`` moves windows of it to the device and
                          back, concurrently with the kernel.
========================  ======================================================================

Words for some of an array:

- A *shard* is what one device has of an array that mesh axes cut.
- A *part* of a gradient is what one device adds to the shard of another, or to its own.
- A *span* is a device's shard of a bucket, or a range of it: what a kernel call steps.
- A *window* is a range of a flat array: a span there, or consecutive ones that move together.
"""
