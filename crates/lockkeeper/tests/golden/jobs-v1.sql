CREATE TABLE public.work (id int PRIMARY KEY, note text);
SET LOCAL lock_timeout = '10s';
SET LOCAL search_path = pg_catalog, pg_temp;
ALTER TABLE public.work
  ADD COLUMN lk_state text NOT NULL DEFAULT 'open' CHECK (lk_state IN ('open', 'done', 'failed')),
  ADD COLUMN lk_run_at timestamptz NOT NULL DEFAULT now(),
  ADD COLUMN lk_fence bigint NOT NULL DEFAULT 0 CHECK (lk_fence BETWEEN 0 AND 9007199254740991),
  ADD COLUMN lk_attempts integer NOT NULL DEFAULT 0 CHECK (lk_attempts >= 0),
  ADD COLUMN lk_holder text,
  ADD COLUMN lk_error text;
CREATE INDEX ON public.work (lk_run_at) WHERE lk_state = 'open';
CREATE INDEX ON public.work (lk_run_at) WHERE lk_state = 'failed';
COMMENT ON COLUMN public.work.lk_state IS 'lockkeeper jobs, format 1';
INSERT INTO public.work VALUES (0, 'taken', 'open', 'TIME', FENCE, 1, 'HOLDER', NULL);
INSERT INTO public.work VALUES (1, 'done', 'done', 'TIME', FENCE, 1, NULL, NULL);
INSERT INTO public.work VALUES (2, 'failed', 'failed', 'TIME', FENCE, 1, NULL, 'declined');
INSERT INTO public.work VALUES (3, 'given back', 'open', 'TIME', FENCE, 0, NULL, NULL);
INSERT INTO public.work VALUES (4, 'open', 'open', 'TIME', 0, 0, NULL, NULL);
