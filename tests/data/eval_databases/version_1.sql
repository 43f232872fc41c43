BEGIN TRANSACTION;
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,
    pid INTEGER,
    started INTEGER,
    boot TEXT,
    gpus TEXT,
    directory TEXT,
    PRIMARY KEY (job_id, number)
);
INSERT INTO "attempts" VALUES('fdc0cfc6d8544d31',1,1.79546855546316504476e+09,1.79546855687991833688e+09,'completed',15111,222208,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/fdc0cfc6d8544d31/1');
INSERT INTO "attempts" VALUES('6c55cf6dbda99972',1,1.79546855693339300159e+09,1.79546855846393728253e+09,'completed',15119,222367,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/6c55cf6dbda99972/1');
INSERT INTO "attempts" VALUES('f5531887f59d02cc',1,1.79546855852732419964e+09,1.79546855981053853036e+09,'failed',15152,222516,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/f5531887f59d02cc/1');
INSERT INTO "attempts" VALUES('f5531887f59d02cc',2,1.79546856145264244076e+09,1.79546856286426210406e+09,'failed',15166,222822,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/f5531887f59d02cc/2');
INSERT INTO "attempts" VALUES('847b77a9be27a0c3',1,1.79546856292331409457e+09,1.79546856398998403553e+09,'expired',NULL,NULL,NULL,'[0]',NULL);
INSERT INTO "attempts" VALUES('7f3a1333d4528ecb',1,1.79546856415998435027e+09,NULL,NULL,15253,223106,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/7f3a1333d4528ecb/1');
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    at REAL NOT NULL
);
INSERT INTO "events" VALUES(1,'fdc0cfc6d8544d31','queued',NULL,1.79546855546161794655e+09);
INSERT INTO "events" VALUES(2,'fdc0cfc6d8544d31','running','merging',1.79546855546316504476e+09);
INSERT INTO "events" VALUES(3,'fdc0cfc6d8544d31','running','evaluating',1.79546855603589105608e+09);
INSERT INTO "events" VALUES(4,'fdc0cfc6d8544d31','completed',NULL,1.79546855687991833688e+09);
INSERT INTO "events" VALUES(5,'6c55cf6dbda99972','queued',NULL,1.79546855693206143383e+09);
INSERT INTO "events" VALUES(6,'6c55cf6dbda99972','running','merging',1.79546855693339300159e+09);
INSERT INTO "events" VALUES(7,'6c55cf6dbda99972','running','evaluating',1.79546855761988115307e+09);
INSERT INTO "events" VALUES(8,'6c55cf6dbda99972','completed',NULL,1.79546855846393728253e+09);
INSERT INTO "events" VALUES(9,'f5531887f59d02cc','queued',NULL,1.79546855851949763299e+09);
INSERT INTO "events" VALUES(10,'f5531887f59d02cc','running','merging',1.79546855852732419964e+09);
INSERT INTO "events" VALUES(11,'f5531887f59d02cc','running','evaluating',1.79546855912790608404e+09);
INSERT INTO "events" VALUES(12,'f5531887f59d02cc','failed',NULL,1.79546855981053853036e+09);
INSERT INTO "events" VALUES(13,'b883ddd290fee61c','queued',NULL,1.79546855987737464903e+09);
INSERT INTO "events" VALUES(14,'b883ddd290fee61c','running','merging',1.79546855988444805144e+09);
INSERT INTO "events" VALUES(15,'b883ddd290fee61c','running','evaluating',1.79546856073592019076e+09);
INSERT INTO "events" VALUES(16,'b883ddd290fee61c','failed',NULL,1.79546856141641020775e+09);
INSERT INTO "events" VALUES(17,'f5531887f59d02cc','queued',NULL,1.79546856144696211814e+09);
INSERT INTO "events" VALUES(18,'f5531887f59d02cc','running','merging',1.79546856145264244076e+09);
INSERT INTO "events" VALUES(19,'f5531887f59d02cc','running','evaluating',1.79546856217970204352e+09);
INSERT INTO "events" VALUES(20,'f5531887f59d02cc','failed',NULL,1.79546856286426210406e+09);
INSERT INTO "events" VALUES(21,'847b77a9be27a0c3','queued',NULL,1.79546856291424894325e+09);
INSERT INTO "events" VALUES(22,'847b77a9be27a0c3','running','merging',1.79546856292331409457e+09);
INSERT INTO "events" VALUES(23,'847b77a9be27a0c3','expired',NULL,1.79546856398998403553e+09);
INSERT INTO "events" VALUES(24,'7f3a1333d4528ecb','queued',NULL,1.79546856415617132191e+09);
INSERT INTO "events" VALUES(25,'7f3a1333d4528ecb','running','merging',1.79546856415998435027e+09);
INSERT INTO "events" VALUES(26,'7f3a1333d4528ecb','running','evaluating',1.79546856501992416381e+09);
INSERT INTO "events" VALUES(27,'92e9fc3e190110f5','queued',NULL,1795468565.04337);
INSERT INTO "events" VALUES(28,'b5d7739ab53e2146','queued',NULL,1.7954685650512645245e+09);
INSERT INTO "events" VALUES(29,'b5d7739ab53e2146','cancelled',NULL,1.79546856506181693076e+09);
INSERT INTO "events" VALUES(30,'5b20255c755b43a5','queued',NULL,1.7954685651034033298e+09);
INSERT INTO "events" VALUES(31,'ebef85e72eb95531','queued',NULL,1.79546856512638902661e+09);
INSERT INTO "events" VALUES(32,'5b20255c755b43a5','superseded',NULL,1.7954685651448893547e+09);
CREATE TABLE forgotten (job_id TEXT PRIMARY KEY);
INSERT INTO "forgotten" VALUES('b883ddd290fee61c');
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT NOT NULL UNIQUE,
    request TEXT NOT NULL,
    run TEXT NOT NULL,
    step INTEGER,
    weights TEXT NOT NULL,
    profile TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    created_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    not_before REAL NOT NULL DEFAULT 0,
    started_at REAL,
    completed_at REAL,
    pin TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    results TEXT,
    superseded_by TEXT,
    attempts_before INTEGER NOT NULL DEFAULT 0,
    alike TEXT
);
INSERT INTO "jobs" VALUES(1,'fdc0cfc6d8544d31','ca8ef93af6dcd28749f5d1834c6ce26f','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-100", "tasks": ["score"], "stamps": {"model.safetensors": [84, 1795468555436808372]}, "fingerprint": "e777d776c1250798", "step": 100, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',100,'model','script','completed',NULL,1.79546855546161794655e+09,1.79546855546161794655e+09,0.0,1.79546855546316504476e+09,1.79546855687991094591e+09,'{DIRECTORY}/root/my-run/_unshard/pins/74ad8d1286ba1a51/checkpoint-100',1,0,NULL,'{DIRECTORY}/work/jobs/fdc0cfc6d8544d31/1/output/results.json',NULL,0,'1db0698aca8e3d47bb69d4cf39d313c7');
INSERT INTO "jobs" VALUES(2,'6c55cf6dbda99972','fd3070b116e3e843a5d8aede51e1787c','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-200", "tasks": ["errors"], "stamps": {"model.safetensors": [84, 1795468556920808426]}, "fingerprint": "209b0b90909beefd", "step": 200, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',200,'model','script','completed',NULL,1.79546855693206143383e+09,1.79546855693206143383e+09,0.0,1.79546855693339300159e+09,1.79546855846392846103e+09,'{DIRECTORY}/root/my-run/_unshard/pins/0bc5a0433d530e43/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/6c55cf6dbda99972/1/output/results.json',NULL,0,'8a7cba1706bc9a2fe91c86a440830456');
INSERT INTO "jobs" VALUES(3,'f5531887f59d02cc','4d039589b966d682d77e1005e7a4ba08','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-300", "tasks": ["fails"], "stamps": {"model.safetensors": [84, 1795468558504808484]}, "fingerprint": "9f7e93fbb2d314fe", "step": 300, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',300,'model','script','failed',NULL,1.79546855851949763299e+09,1.79546856144696211814e+09,0.0,1.79546856145264244076e+09,1.79546856286426019673e+09,'{DIRECTORY}/root/my-run/_unshard/pins/eb05002aed365547/checkpoint-300',2,1,'script failed
  found:    exit code 1
  hint:     the log of the job says why
The log ends with:
nothing was measured',NULL,NULL,1,'0c2002bc3f309152c2eafe9766f4deb4');
INSERT INTO "jobs" VALUES(4,'b883ddd290fee61c','fc70bc96a0c2df56535c46ecba63d4e6','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-250", "tasks": ["fails"], "stamps": {"model.safetensors": [84, 1795468559868808534]}, "fingerprint": "e023d0cc1531f422", "step": 250, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',250,'model','script','failed',NULL,1.79546855987737464903e+09,1.79546855987737464903e+09,0.0,1.79546855988444805144e+09,1.79546856141640758519e+09,'{DIRECTORY}/root/my-run/_unshard/pins/c736a8e7608f3878/checkpoint-250',1,1,'script failed
  found:    exit code 1
  hint:     the log of the job says why
The log ends with:
nothing was measured',NULL,NULL,0,'4b340ed563fd452fcd2ff44a133d29a0');
INSERT INTO "jobs" VALUES(5,'847b77a9be27a0c3','dd4acb0e407bfabf6a4d14a218093abd','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-350", "tasks": ["score"], "stamps": {}, "fingerprint": "", "step": 350, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',350,'model','script','expired',NULL,1.79546856291424894325e+09,1.79546856291424894325e+09,0.0,1.79546856292331409457e+09,1.79546856398998165129e+09,NULL,1,0,'checkpoint {DIRECTORY}/root/my-run/checkpoint-350 does not exist (removed, or the path is wrong)
  hint:     check the path; pin checkpoints when they are submitted, or let more of them stay',NULL,NULL,0,'dd4acb0e407bfabf6a4d14a218093abd');
INSERT INTO "jobs" VALUES(6,'7f3a1333d4528ecb','fa1ac2fea76ed406199c1fb6780e3cc0','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-400", "tasks": ["waits"], "stamps": {"model.safetensors": [84, 1795468564108808689]}, "fingerprint": "81bc238c0bd2cbe2", "step": 400, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',400,'model','script','running','evaluating',1.79546856415617132191e+09,1.79546856415617132191e+09,0.0,1.79546856415998435027e+09,NULL,'{DIRECTORY}/root/my-run/_unshard/pins/6ee2372445dc7b6d/checkpoint-400',1,0,NULL,NULL,NULL,0,'449d31e115e8c7f1269de63e85aa3396');
INSERT INTO "jobs" VALUES(7,'92e9fc3e190110f5','591d798ec86cf9b1f467b719406834ac','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-500", "tasks": ["score"], "stamps": {"model.safetensors": [84, 1795468565016808722]}, "fingerprint": "a36ccd03ce4f436a", "step": 500, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',500,'model','script','queued',NULL,1795468565.04337,1795468565.04337,0.0,NULL,NULL,'{DIRECTORY}/root/my-run/_unshard/pins/73659352c336daff/checkpoint-500',0,0,NULL,NULL,NULL,0,'12eb87162f8946fed17d200a17d02b35');
INSERT INTO "jobs" VALUES(8,'b5d7739ab53e2146','0cb133e877aa0609675de90d80bd1257','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-600", "tasks": ["score"], "stamps": {"model.safetensors": [84, 1795468565042810334]}, "fingerprint": "e79b053469286af2", "step": 600, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',600,'model','script','cancelled',NULL,1.7954685650512645245e+09,1.7954685650512645245e+09,0.0,NULL,1.79546856506172156338e+09,'{DIRECTORY}/root/my-run/_unshard/pins/b345c8de8bf6c91f/checkpoint-600',0,0,NULL,NULL,NULL,0,'4057b223fb4567893c0f50e3302d9c37');
INSERT INTO "jobs" VALUES(9,'5b20255c755b43a5','2001da5b5b45b7180f73da4c84c14b6a','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-700", "tasks": ["score"], "stamps": {"model.safetensors": [84, 1795468565088808725]}, "fingerprint": "b5929852a39beba4", "step": 700, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',700,'model','script','superseded',NULL,1.7954685651034033298e+09,1.7954685651034033298e+09,0.0,NULL,1.79546856514473366739e+09,'{DIRECTORY}/root/my-run/_unshard/pins/93bc8b4ba99b7076/checkpoint-700',0,0,'saved again since: see job ebef85e72eb95531',NULL,'ebef85e72eb95531',0,'64f18abeb790fd982897043491f11640');
INSERT INTO "jobs" VALUES(10,'ebef85e72eb95531','01fa0b2770ad4c803ed9461103f074ac','{"run": "my-run", "checkpoint": "{DIRECTORY}/root/my-run/checkpoint-700", "tasks": ["score"], "stamps": {"model.safetensors": [84, 1795468565104808725]}, "fingerprint": "4a5a0f3d3194c5b0", "step": 700, "weights": "model", "profile": "script", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "seed": null}','my-run',700,'model','script','queued',NULL,1.79546856512638902661e+09,1.79546856512638902661e+09,0.0,NULL,NULL,'{DIRECTORY}/root/my-run/_unshard/pins/c885fa9805d3e170/checkpoint-700',0,0,NULL,NULL,NULL,0,'64f18abeb790fd982897043491f11640');
CREATE TABLE pinned_runs (run TEXT PRIMARY KEY);
INSERT INTO "pinned_runs" VALUES('{DIRECTORY}/root/my-run');
CREATE TABLE results (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    metric TEXT NOT NULL,
    value REAL NOT NULL,
    stderr REAL,
    PRIMARY KEY (job_id, metric)
);
INSERT INTO "results" VALUES('fdc0cfc6d8544d31','score/acc',1.0,NULL);
INSERT INTO "results" VALUES('fdc0cfc6d8544d31','score/size',12.0,NULL);
INSERT INTO "results" VALUES('6c55cf6dbda99972','errors/acc',2.0,0.0125);
INSERT INTO "results" VALUES('6c55cf6dbda99972','errors/size',12.0,NULL);
CREATE INDEX jobs_by_status ON jobs (status, queued_at, number);
CREATE UNIQUE INDEX one_open_attempt ON attempts (job_id) WHERE ended_at IS NULL;
CREATE INDEX jobs_by_step ON jobs (run, step);
CREATE INDEX jobs_by_pin ON jobs (pin);
CREATE INDEX jobs_alike ON jobs (alike);
CREATE INDEX jobs_of_status ON jobs (status, number);
CREATE INDEX jobs_of_runs ON jobs (run, status, step);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',10);
INSERT INTO "sqlite_sequence" VALUES('events',32);
COMMIT;
PRAGMA application_id = 236039030;
PRAGMA user_version = 1;
