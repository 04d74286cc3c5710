"""The engine: owns the model, the slots and the main loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamasrv import binding
from llamasrv.engine.adapters import Adapters, resolve
from llamasrv.engine.backend import AdapterInfo, Backend, BackendError
from llamasrv.engine.batch_builder import can_split_embeddings
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.emit import Emitter
from llamasrv.engine.log import slt_inf, slt_trc, srv_dbg, srv_inf, srv_trc, srv_wrn
from llamasrv.engine.meta import ServerMeta
from llamasrv.engine.metrics import ServerMetrics
from llamasrv.engine.native import NativeBackend
from llamasrv.engine.prefix import PrefixSources
from llamasrv.engine.prompt_cache import PromptCache
from llamasrv.engine.prompt_scores import MAX_OUTPUTS
from llamasrv.engine.queue import ServerQueue
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.response import ServerResponse
from llamasrv.engine.result import (
    SHUTTING_DOWN,
    ControlResult,
    ErrorType,
    GetLoraResult,
    LoraInfo,
    MetricsResult,
    SetLoraResult,
    SlotsResult,
)
from llamasrv.engine.slot import Slot, SlotState, WaitFor
from llamasrv.engine.slot_actions import SlotActions
from llamasrv.engine.slots import SlotPool
from llamasrv.engine.stats import now_us
from llamasrv.engine.step import Step
from llamasrv.engine.task import NEEDS_SLOT, READ_ONLY, SLOT_ACTIONS, Task, TaskType
from llamasrv.engine.text import GeneratedText


class LoadError(RuntimeError):
    """The model could not be loaded; the text says why."""


class ServerContext:
    """Everything between the queue and the context.

    The thread that calls :meth:`start_loop` owns slots, samplers and the backend. Other threads use :attr:`queue`,
    :attr:`response`, :meth:`reader`, :meth:`terminate` and, once loaded, :attr:`meta`, :attr:`vocab` and
    :attr:`chat_templates`.
    """

    meta: ServerMeta
    vocab: binding.Vocab
    #: Outlive the model: they serve through sleep.
    chat_templates: binding.ChatTemplates

    def __init__(self) -> None:
        self.queue = ServerQueue()
        self.response = ServerResponse()
        self.params: dict[str, Any] = {}
        self.metrics = ServerMetrics()
        self.config = EngineConfig()
        self.pool: SlotPool
        self.prefixes: PrefixSources
        self.actions: SlotActions
        self.step: Step
        self._backend: Backend | None = None
        self._lora: list[float] = []
        self._lora_info: list[AdapterInfo] = []
        self.emit = Emitter(self.response)
        self._wired = False
        self._native_params: binding.Params | None = None
        #: What :meth:`start_loop` waits with before it falls asleep; called once the model is gone or back.
        self.on_sleeping: Callable[[bool], None] = lambda asleep: None

    @classmethod
    def with_backend(cls, backend: Backend, config: EngineConfig) -> ServerContext:
        """An engine over a backend that is already loaded."""
        self = cls()
        self._attach(backend, config)
        return self

    # -- start and end

    def load_model(
        self,
        params: binding.Params,
        progress: Callable[[float], bool] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load model and context and prepare the slots. Raises :class:`LoadError`.

        ``params`` must live as long as this object. ``progress`` is told how much of the weights is loaded (0..1); it
        may return False to stop. ``options``: fields of :class:`EngineConfig` that the original does not know.
        """
        asked = params.to_dict()
        srv_inf("load_model", "loading model '%s'", asked["model"]["name"])
        params.set(**_output_limits(asked))
        self._native_params = params
        backend = self._load(params, progress)
        self.params = params.to_dict()
        config = EngineConfig.from_params({**self.params, **(options or {})})
        self._disable_unsupported(backend, config)
        self._attach(backend, config)
        self.vocab = backend.model.vocab
        self.chat_templates = self._load_chat_templates(backend.model, params)
        self.meta = _meta(backend, self.params, self.pool.slots[0].n_ctx, self.chat_templates)

    @staticmethod
    def _load(params: binding.Params, progress: Callable[[float], bool] | None = None) -> NativeBackend:
        try:
            return NativeBackend(params, progress)
        except binding.NativeError as exc:
            # the native side says it again from layer to layer; the first line is the cause
            raise LoadError(str(exc).partition("\n")[0]) from exc

    @staticmethod
    def _load_chat_templates(model: binding.Model, params: binding.Params) -> binding.ChatTemplates:
        try:
            return binding.ChatTemplates.from_params(model, params)
        except (binding.NativeError, ValueError) as exc:
            hint = "another one is given by --chat-template, --no-jinja does without it"
            raise LoadError(f"the chat template cannot be used: {exc} ({hint})") from exc

    @staticmethod
    def _disable_unsupported(backend: Backend, config: EngineConfig) -> None:
        if not backend.can_shift:
            if config.ctx_shift:
                config.ctx_shift = False
                srv_wrn("load_model", "ctx_shift is not supported by this context, it will be disabled")
            if config.n_cache_reuse:
                config.n_cache_reuse = 0
                srv_wrn("load_model", "cache_reuse is not supported by this context, it will be disabled")
        if config.swa_full and backend.n_swa == 0:
            config.swa_full = False
            srv_wrn("load_model", "swa_full is not supported by this model, it will be disabled")
        if config.cache_idle_slots and config.cache_ram_mib == 0:
            config.cache_idle_slots = False
            srv_wrn("load_model", "--cache-idle-slots requires --cache-ram, disabling")

    def _attach(
        self, backend: Backend, config: EngineConfig, lora: list[float] | None = None, cache: PromptCache | None = None
    ) -> None:
        """Prepare the slots. ``lora`` and ``cache`` are what an earlier life of the same model left."""
        self._backend = backend
        self.config = config
        self._lora = list(config.lora) if lora is None else lora
        self._lora_info = backend.adapter_infos()
        n_ctx_slot = self._slot_context(backend, config)
        srv_inf(
            "load_model",
            "initializing, n_slots = %d, n_ctx_slot = %d, kv_unified = '%s'",
            config.n_parallel,
            n_ctx_slot,
            "true" if config.kv_unified else "false",
        )
        self.pool = SlotPool(backend, config, n_ctx_slot, Adapters(tuple(self._lora)), cache)
        if self.pool.cache is not None:
            limit = "no limit" if config.cache_ram_mib < 0 else f"{config.cache_ram_mib} MiB"
            srv_trc("load_model", "prompt cache is enabled, size limit: %s", limit)
        if config.cache_idle_slots and self.pool.cache is not None:
            srv_dbg("load_model", "__TEST_TAG_CACHE_IDLE_SLOTS_ENABLED__")
        self.prefixes = PrefixSources(backend, config, self.pool)
        self.actions = SlotActions(backend, self.pool, config.n_ctx_checkpoints, backend.identity())
        self.step = Step(
            backend, config, self.pool, self.prefixes, self.emit, self.metrics, self.queue.yield_to_queue, self.release
        )
        if not self._wired:
            self._wired = True
            self.queue.on_new_task(self.process_task)
            self.queue.on_update_slots(self.update_slots)
            self.queue.on_sleeping_state(self._change_sleep)
            self.queue.on_cancel(lambda id_task: self.step.cancelled(id_task))
            self.response.on_overflow(self._cancel_all)
            self.queue.on_refused(lambda task: self.emit.error(task, SHUTTING_DOWN, ErrorType.UNAVAILABLE))

    @staticmethod
    def _slot_context(backend: Backend, config: EngineConfig) -> int:
        """Context of one slot: that of a sequence, capped by --kv-unified-per-slot and by the model's training."""
        n_ctx = backend.n_ctx_seq
        cap = config.kv_unified_per_slot
        if cap > 0:
            if n_ctx > cap:
                srv_inf("load_model", "capping per-slot context (%d) to --kv-unified-per-slot (%d)", n_ctx, cap)
            elif cap > n_ctx:
                srv_wrn(
                    "load_model",
                    "--kv-unified-per-slot (%d) exceeds the per-slot pool capacity (%d) - cap has no effect",
                    cap,
                    n_ctx,
                )
            n_ctx = min(n_ctx, cap)
        if n_ctx > backend.n_ctx_train:
            srv_wrn(
                "load_model",
                "the slot context (%d) exceeds the training context of the model (%d) - capping",
                n_ctx,
                backend.n_ctx_train,
            )
        return min(n_ctx, backend.n_ctx_train)

    def start_loop(self) -> None:
        """Work until :meth:`terminate`; blocks the calling thread, which from then on owns the engine."""
        idle = self.config.sleep_idle_seconds
        self.queue.start_loop(idle * 1000 if idle >= 0 else -1)

    def _change_sleep(self, asleep: bool) -> None:
        """Let go of model and context, or load them again. What the slots held goes to the RAM cache, which stays."""
        if asleep:
            srv_inf("sleep", "server is entering sleeping state")
            for slot in self.pool.slots:
                self.pool.save_prompt(slot)
                slot.prompt.clear()
            backend, self._backend = self._backend, None
            if backend is not None:
                backend.close()
        else:
            srv_inf("sleep", "server is exiting sleeping state")
            assert self._native_params is not None
            native = self._load(self._native_params, lambda progress: not self.queue.is_ending)
            self._attach(native, self.config, self._lora, self.pool.cache)
            self.vocab = native.model.vocab
        self.on_sleeping(asleep)

    def drain(self, timeout: float) -> None:
        """Refuse what has not started and give what runs up to ``timeout`` seconds to end. Not on the loop's thread."""
        self.queue.drain()
        self.queue.wait_until_drained(timeout)

    def terminate(self) -> None:
        """End the main loop from any thread, also out of a running decode; readers are woken."""
        self.queue.terminate()
        # before the decode is stopped, so that nobody is told of that
        self.response.terminate()
        if self._backend is not None:
            self._backend.stop()

    def close(self) -> None:
        """Free model and context. Only after the loop has ended."""
        backend, self._backend = self._backend, None
        if backend is not None:
            for slot in self.pool.slots:
                slot.reset()
            backend.close()

    def reader(self) -> ResponseReader:
        config = self.config
        limit = config.n_parallel + config.queue_max if config.queue_max >= 0 else None
        return ResponseReader(self.queue, self.response, limit=limit)

    def metrics_snapshot(self, reset_bucket: bool = False) -> MetricsResult:
        """Counters as they are, without asking the main loop. ``reset_bucket``: the rates start anew."""
        result = MetricsResult(
            id=-1,
            metrics=self.metrics.copy(),
            n_processing_slots=self.pool.n_processing,
            n_tasks_deferred=self.queue.n_deferred,
        )
        result.metrics.requests.n_refused = self.response.n_refused
        if reset_bucket:
            self.metrics.reset_bucket()
        return result

    def slots_snapshot(self, id_task: int = -1) -> SlotsResult:
        """The slots as they are, without asking the main loop: plain reads, which may fall into a step."""
        speculative = self.step.speculation is not None
        slots = [slot.snapshot(self.config.slots_debug, speculative) for slot in self.pool.slots]
        n_idle = sum(not slot.is_processing for slot in slots)
        return SlotsResult(id=id_task, slots=slots, n_idle_slots=n_idle)

    def retry_after_s(self) -> int:
        """Seconds, 1 to 60, after which a place in the queue can be hoped for."""
        mean_s = self.metrics.requests.duration.mean
        return max(1, min(60, round(mean_s * self.response.n_open / max(1, self.config.n_parallel))))

    # -- tasks

    def process_task(self, task: Task, is_yielding: bool = False) -> bool:
        """Handle one task. False: refused, because a native call is running and the task would change something."""
        if is_yielding and task.type not in READ_ONLY:
            return False
        if task.type in NEEDS_SLOT:
            self._schedule(task)
        elif task.type is TaskType.CANCEL:
            self._cancel(task.id_target)
        elif task.type is TaskType.METRICS:
            result = self.metrics_snapshot(task.metrics_reset_bucket)
            result.id = task.id
            self.response.send(result)
        elif task.type is TaskType.SLOT_GET:
            self.response.send(self.slots_snapshot(task.id))
        elif task.type in SLOT_ACTIONS:
            self._slot_action(task)
        elif task.type is TaskType.CONTROL:
            self.response.send(self._control(task))
        elif task.type is TaskType.GET_LORA:
            self._get_lora(task)
        elif task.type is TaskType.SET_LORA:
            self._set_lora(task)
        return True

    def _cancel_all(self, ids: list[int]) -> None:
        cancels = [Task(id=self.queue.get_new_id(), type=TaskType.CANCEL, id_target=id_task) for id_task in ids]
        self.queue.post(cancels, front=True)

    def _cancel(self, id_target: int) -> None:
        # it may have been set aside between the post of the CANCEL and now
        self.queue.remove_pending(id_target)
        for slot in self.pool.slots:
            if slot.task is not None and slot.task.id == id_target:
                self.release(slot)
                break

    def _control(self, task: Task) -> ControlResult:
        """Act on a completion while it is generated."""
        for slot in self.pool.slots:
            if slot.task is None or not task.control_cmpl_id or slot.task.cmpl_id != task.control_cmpl_id:
                continue
            if task.control_action != "reasoning_end":
                return ControlResult(id=task.id, message="unknown control action")
            if not slot.task.params.sampling.reasoning_control or slot.sampler is None:
                return ControlResult(id=task.id, message="reasoning control not enabled for this completion")
            slot.sampler.force_reasoning_end()
            return ControlResult(id=task.id, success=True)
        srv_wrn("control", "%s on unknown completion id=%s", task.control_action, task.control_cmpl_id)
        return ControlResult(id=task.id, message="no active completion for this id")

    def _slot_action(self, task: Task) -> None:
        assert task.slot_action is not None
        slot = self.pool.by_id(task.slot_action.id_slot)
        if slot.is_processing:
            task.id_slot = slot.id
            self._defer(task)
            return
        self.response.send(self.actions.run(task, slot))
        # the slot stays free: whoever waits behind this task can have it
        self.queue.pop_deferred_task(slot.id)

    def _get_lora(self, task: Task) -> None:
        backend = self._backend
        assert backend is not None
        infos = [
            LoraInfo(
                id=i,
                path=info.path,
                scale=self._lora[i],
                task_name=info.task_name,
                prompt_prefix=info.prompt_prefix,
                alora_invocation_string=b"".join(backend.piece(token, True) for token in info.invocation),
                alora_invocation_tokens=list(info.invocation),
            )
            for i, info in enumerate(self._lora_info)
        ]
        self.response.send(GetLoraResult(id=task.id, loras=infos))

    def _set_lora(self, task: Task) -> None:
        scales = task.set_lora or {}
        self._lora = [scales.get(i, 0.0) for i in range(len(self._lora))]
        self.response.send(SetLoraResult(id=task.id))

    def _adapters(self, task: Task) -> Adapters:
        """What the task is computed under: its own scales, where it names any, else the server's.

        Raises ValueError for adapters that do not go together.
        """
        own = task.params.lora
        scales = self._lora if own is None else [own.get(i, 0.0) for i in range(len(self._lora))]
        return resolve(scales, [info.invocation for info in self._lora_info], task.tokens)

    # -- scheduling

    def _schedule(self, task: Task) -> bool:
        """Start a task in a slot, or set it aside. False if it was set aside."""
        if not self.response.is_waiting(task.id):
            srv_dbg("schedule", "nobody waits for task %d, dropped", task.id)
            return True
        if task.id_slot != -1:
            task.id_slot %= len(self.pool.slots)
        if not task.was_deferred and self.queue.has_deferred(task.id_slot):
            self._defer(task)
            return False
        try:
            adapters = self._adapters(task)
        except ValueError as exc:
            self.emit.error(task, str(exc), ErrorType.INVALID_REQUEST)
            return True
        slot, save = self.pool.select(task, adapters)
        if slot is None or slot.is_processing:
            self._defer(task)
            return False
        children = [free for free in self.pool.free() if free is not slot][: len(task.child_tasks)]
        if len(children) < len(task.child_tasks):
            self._defer(task)
            return False
        if self._launch_all(task, slot, children, save):
            task.posting.is_started = True
            self.pool.publish_idle()
        return True

    def _defer(self, task: Task) -> None:
        srv_dbg("schedule", "no slot is available, defer task, id_task = %d", task.id)
        task.was_deferred = True
        self.queue.defer(task)

    def _launch_all(self, task: Task, slot: Slot, children: list[Slot], save: bool) -> bool:
        """Start a task and its children together, or none of them: then all are answered with the error."""
        started: list[Slot] = []
        try:
            for part, place in zip([*task.child_tasks, task], [*children, slot], strict=True):
                self._launch(place, part, self._adapters(part), save)
                started.append(place)
                if part is not task:
                    # before the parent looks for somebody who computes its beginning
                    place.state = SlotState.WAIT_OTHER
                    place.wait = WaitFor(slot, task.id, task.n_tokens_shared or task.n_tokens)
        except (BackendError, ValueError) as exc:
            for place in started:
                self.release(place)
            self.emit.error(task, str(exc), ErrorType.INVALID_REQUEST)
            return False
        return True

    def _launch(self, slot: Slot, task: Task, adapters: Adapters, save: bool) -> None:
        """Bind a task to a free slot. Raises ValueError or BackendError if the task cannot run at all.

        ``save``: the prompt that is in the slot goes to the RAM cache first.
        """
        backend = self._backend
        assert backend is not None
        if task.tokens and not (min(task.tokens) >= 0 and max(task.tokens) < backend.n_vocab):
            raise ValueError("Prompt contains invalid tokens")
        sampler = None
        if task.need_sampling:
            sampling = task.params.sampling
            try:
                sampler = backend.new_sampler(sampling)
            except BackendError as exc:
                raise BackendError(f"Failed to initialize samplers: {exc}") from exc
            # the logits before sampling are not to be had from the device
            needs_probs = sampling.n_probs > 0 and not task.params.post_sampling_probs
            needs_logits = needs_probs or task.prompt_logprobs >= 0
            on_device = sampling.backend_sampling and not needs_logits
            backend.set_sampler(slot.id, sampler if on_device else None)
        if save or task.is_child or (adapters != slot.adapters and not task.is_stateless):
            srv_trc("launch_slot", "updating prompt cache")
            self.pool.save_prompt(slot)
        if adapters != slot.adapters:
            n_alike = adapters.n_alike(slot.adapters)
            if n_alike < slot.prompt.n_tokens:
                slt_trc(slot, "launch_slot", "clearing cache for lora change from token %d on", n_alike)
                self.pool.keep_first(slot, n_alike)
            slot.adapters = adapters
        slot.sampler = sampler
        slot.text = GeneratedText([word.encode(errors="replace") for word in task.params.antiprompt])
        slot.n_predict_max = task.params.n_predict if task.params.n_predict != -1 else self.config.n_predict
        slot.task = task
        slot.state = SlotState.STARTED
        if not task.is_child:
            if self.prefixes.can_share:
                slot.wait = self.prefixes.fill(slot, task)
            elif save:
                self.pool.swap_prompt(slot, task.tokens)
            if slot.wait is not None:
                slot.state = SlotState.WAIT_OTHER
            if self.pool.cache is not None:
                self.pool.cache.update()
        if not task.is_child:
            self.metrics.requests.queue.observe(max(0, now_us() - task.t_posted) / 1e6)
        slt_inf(slot, "launch_slot", "processing task, is_child = %d", task.is_child)

    def release(self, slot: Slot) -> None:
        """End a slot's task. Tokens and cells stay for the next request, save those of a child."""
        if not slot.is_processing:
            return
        task = slot.task
        assert task is not None
        slt_inf(slot, "release", "stop processing: n_tokens = %d, truncated = %d", slot.prompt.n_tokens, slot.truncated)
        slot.t_last_used = now_us()
        slot.state = SlotState.IDLE
        if task.is_child:
            self.pool.clear_prompt(slot)
        stats = slot.stats
        if stats.n_gen > 0:
            metrics = self.metrics
            metrics.add_predict(stats.n_gen, stats.n_gen_steps, stats.t_gen_us)
            metrics.n_draft_tokens += stats.n_draft_tokens
            metrics.n_draft_accepted += stats.n_draft_accepted
            metrics.n_draft_verif_steps += stats.n_draft_verif_steps
            metrics.add_accepted(slot.n_accepted_per_pos)
        slot.reset()
        self.queue.pop_deferred_task(slot.id)

    def _start_deferred(self) -> None:
        """Start waiting tasks for which there is room, oldest first."""
        for slot in self.pool.slots:
            while not slot.is_processing and self.queue.n_deferred:
                task = self.queue.take_deferred(slot.id)
                if task is None:
                    break
                if task.type in SLOT_ACTIONS:
                    self._slot_action(task)
                elif not self._schedule(task):
                    break

    def update_slots(self) -> None:
        """One turn of inference; called by the main loop whenever the tasks at hand are handled."""
        if self.queue.n_deferred:
            self._start_deferred()
        if self.pool.n_processing == 0:
            srv_trc("update_slots", "all slots are idle")
            self.step.flush_idle()
            return
        # an empty task keeps the loop turning until all slots are idle
        self.queue.post(Task(id=self.queue.get_new_id(), type=TaskType.NEXT_RESPONSE))
        self.step.run()


def _output_limits(params: dict[str, Any]) -> dict[str, int]:
    """How many outputs one batch can ask for: all entries for embeddings, else a draft's per sequence and scores'."""
    if params["embedding"] or params["pooling_type"] not in ("unspecified", "none"):
        return {"n_outputs_max": params["n_batch"], "n_outputs_max_per_seq": 1}
    limits = params["speculative"]["output_limits"]
    total = max(1, limits["total"]) + MAX_OUTPUTS
    return {"n_outputs_max": total, "n_outputs_max_per_seq": max(1, limits["per_seq"])}


def _meta(
    backend: NativeBackend, params: dict[str, Any], n_ctx_slot: int, templates: binding.ChatTemplates
) -> ServerMeta:
    model, vocab = backend.model, backend.model.vocab
    info, facts = model.info(), model.meta()
    prefix = f"{facts.get('general.architecture', '')}.decision."
    aliases = tuple(params["model_alias"])
    name = aliases[0] if aliases else params["model"]["name"] or Path(params["model"]["path"]).name

    def text(token: int) -> str:
        return vocab.piece(token, True).decode(errors="replace") if token >= 0 else ""

    return ServerMeta(
        build_info=binding.build_info(),
        model_name=name,
        model_aliases=aliases,
        model_tags=tuple(params["model_tags"]),
        model_path=params["model"]["path"],
        model_ftype=info["ftype"],
        model_n_params=model.n_params,
        model_size=model.size,
        vocab_type=vocab.type,
        n_vocab=vocab.n_tokens,
        n_ctx_train=model.n_ctx_train,
        n_embd=model.n_embd,
        slot_n_ctx=n_ctx_slot,
        pooling_type=backend.pooling_type,
        bos_token=text(vocab.bos),
        eos_token=text(vocab.eos),
        chat_template=templates.source,
        chat_template_tool_use=templates.source_tool_use,
        chat_template_caps=templates.caps,
        logit_bias_eog=tuple((int(token), float(bias)) for token, bias in info["logit_bias_eog"]),
        n_embd_out=model.n_embd_out,
        n_ubatch=backend.n_ubatch,
        can_split_embeddings=can_split_embeddings(backend),
        rerank_template=facts.get("tokenizer.chat_template.rerank", ""),
        systemone_template=facts.get("tokenizer.chat_template.systemone", ""),
        decision={key[len(prefix) :]: value for key, value in facts.items() if key.startswith(prefix)},
        output_modalities=("text",) if info["decision_type"] in ("none", "unknown") else ("decisions",),
    )
